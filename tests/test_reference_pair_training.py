"""The recipe of the reference pair on a CPU, at toy size: tokenizer, data, training, growth, kernels."""

from __future__ import annotations

import math
import os
import pydoc_data.topics
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments.reference_pair.config import Phase, Shape, TrainConfig  # noqa: E402
from experiments.reference_pair.data import prepare, visits  # noqa: E402
from experiments.reference_pair.fla_backward import chunk_bwd_dqkwg  # noqa: E402
from experiments.reference_pair.model import build, grow  # noqa: E402
from experiments.reference_pair.tokenizer import train_tokenizer  # noqa: E402
from experiments.reference_pair.train import Trainer, learning_rate, save_model  # noqa: E402

VOCABULARY = 512
SMALL = Shape(hidden_size=32, intermediate_size=48, vocab_size=VOCABULARY, num_hidden_layers=4)
WIDE = Shape(hidden_size=48, intermediate_size=80, vocab_size=VOCABULARY, num_hidden_layers=4)
CONFIG = TrainConfig(
    shape=SMALL,
    phases=(Phase(tokens=1024, length=128, sequences=2), Phase(tokens=512, length=256, sequences=1)),
    lr=3e-3,
    warmup_tokens=256,
    recall_share=0.3,
    log_every=2,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: waiting for a second thread at each costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and token arrays made from the prose that is installed with Python."""
    folder = tmp_path_factory.mktemp("pair")
    texts = folder / "books"
    texts.mkdir()
    topics = sorted(pydoc_data.topics.topics.values(), key=len)[-6:]
    for i, topic in enumerate(topics):
        (texts / f"{i}.txt").write_text(topic, encoding="utf-8")
    train_tokenizer(topics, VOCABULARY).save_pretrained(folder / "tokenizer")
    prepare([texts], set(), folder / "tokenizer", folder / "data", {128: 8, 256: 60}, seed=0, workers=1)
    return folder


def trainer(prepared: Path, config: TrainConfig = CONFIG) -> Trainer:
    """A run from fresh weights."""
    torch.manual_seed(config.seed)
    return Trainer(build(config.shape, 0, 3), config, prepared / "data", torch.device("cpu"))


def test_tokenizer_is_lossless_and_splits_digits(prepared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    text = "Room 4821, naïve “café”\n\n\tof 漢字."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert [t for t in tokenizer.convert_ids_to_tokens(ids) if any(c.isdigit() for c in t)] == list("4821")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_answer_masks_cover_the_answers(prepared: Path) -> None:
    """What the mask marks has to be a value that was stated before it in the same document."""
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    ids, mask = (np.load(prepared / "data" / f"{name}_256.npy") for name in ("recall", "answers"))
    answers = 0
    for row, marked in zip(ids, mask, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], marked, [0]])))
        for start, stop in edges.reshape(-1, 2):
            if stop < len(row):  # the last one may be cut off
                answers += 1
                assert tokenizer.decode(row[start:stop]) in tokenizer.decode(row[:start])
    assert answers >= 4


def test_every_epoch_visits_everything_once() -> None:
    seen = visits(7, seed=1, salt=0, first=0, count=14)
    assert [e for e, _ in seen] == [0] * 7 + [1] * 7
    assert sorted(i for e, i in seen if e == 0) == sorted(i for e, i in seen if e == 1) == list(range(7))
    assert visits(7, seed=1, salt=0, first=5, count=4) == seen[5:9]
    assert visits(7, seed=1, salt=1, first=0, count=14) != seen


def test_learning_rate_follows_tokens() -> None:
    rates = [learning_rate(CONFIG, t) for t in range(0, CONFIG.tokens + 1, 128)]
    peak = rates.index(max(rates))
    assert rates[0] < 0.01 * CONFIG.lr
    assert peak * 128 == CONFIG.warmup_tokens
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(CONFIG.final_lr * CONFIG.lr)


def test_resumed_run_equals_uninterrupted_run(prepared: Path, tmp_path: Path) -> None:
    """Bit-exact: the same operations in the same order on one CPU."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = trainer(prepared)
    whole.run(tmp_path / "whole")
    first = trainer(prepared)
    first.run(tmp_path / "parts", stop_at=3)
    torch.manual_seed(99)  # a new process: other random state, other fresh weights
    second = Trainer(build(SMALL, 0, 3), CONFIG, prepared / "data", torch.device("cpu"))
    second.run(tmp_path / "parts")
    assert second.step == CONFIG.steps == 6
    assert second.tokens == CONFIG.tokens
    for (name, a), b in zip(
        whole.model.state_dict().items(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    rows = [(tmp_path / n / "loss.csv").read_text().splitlines() for n in ("whole", "parts")]
    assert rows[0][-1].split(",")[:6] == rows[1][-1].split(",")[:6]


def test_growth_keeps_the_function_and_then_trains(prepared: Path, tmp_path: Path) -> None:
    """Logits of scale 1 agree to 5e-3: the norms' eps of 1e-6 meets another mean square; a wrong norm moves 0.1."""
    (tmp_path / "source").mkdir()
    run = trainer(prepared)
    run.run(tmp_path / "source")
    source = run.model.eval()
    with torch.no_grad():
        for name, p in source.named_parameters():
            if name.endswith("norm.weight"):
                p.add_(torch.randn_like(p) * 0.2)  # trained norms are not at their start
            elif p.ndim == 2:
                p.add_(torch.randn_like(p) * 0.1)
    receiver = grow(source, WIDE)
    ids = torch.arange(100)[None] % VOCABULARY
    with torch.no_grad():
        wanted, found = source(ids).logits, receiver.eval()(ids).logits
    assert wanted.std() > 0.5
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3)
    config = TrainConfig(shape=WIDE, phases=CONFIG.phases, lr=1e-3, warmup_tokens=512, recall_share=0.3)
    grown = Trainer(receiver, config, prepared / "data", torch.device("cpu"))
    grown.train_step()
    down = receiver.model.layers[0].mlp.down_proj.weight
    assert down[SMALL.hidden_size :].abs().sum() > 0, "the new residual dims do not learn"
    save_model(receiver, prepared / "tokenizer", tmp_path / "receiver")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "receiver")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, receiver.lm_head.weight.bfloat16())
    assert loaded.generation_config.eos_token_id == [0, 2]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "receiver")) == VOCABULARY


@pytest.mark.parametrize("T", [128, 100])
def test_chunk_gradients_against_autograd(T: int) -> None:
    """1e-5 is the rounding of float32 decays; T = 100 leaves a padded chunk."""
    torch.manual_seed(T)
    B, H, K, V, C = 2, 3, 4, 5, 64
    N = -(-T // C)
    shapes = {"q": K, "k": K, "v": V, "do": V, "dv": V, "w": K}
    x = {n: torch.randn(B, T, H, d, dtype=torch.float64, requires_grad=True) for n, d in shapes.items()}
    h, dh = (torch.randn(B, N, H, K, V, dtype=torch.float64) for _ in range(2))
    steps = torch.rand(B, T, H, dtype=torch.float64)
    g = torch.cat([-s.cumsum(1) * 0.2 for s in steps.split(C, 1)], 1).requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for n in range(N):
        at = slice(n * C, min(T, (n + 1) * C))
        q, k, v, do, dv, w = (x[name][:, at].transpose(1, 2) for name in ("q", "k", "v", "do", "dv", "w"))
        gc = g[:, at].transpose(1, 2)
        last = gc[..., -1:]
        scores = (q @ k.mT * (gc[..., :, None] - gc[..., None, :]).exp2()).tril()
        out = 0.5 * (gc.exp2()[..., None] * q @ h[:, n] + scores @ v)
        after = last[..., None].exp2() * h[:, n] + (k * (last - gc).exp2()[..., None]).mT @ v
        # dv is the whole gradient of the corrected values, which w enters by v = u - w h.
        loss = loss + (out * do).sum() + (after * dh[:, n]).sum() - ((w @ h[:, n]) * dv).sum()
    wanted = torch.autograd.grad(loss, [x["q"], x["k"], x["w"], g])
    plain = {name: tensor.detach() for name, tensor in x.items()}
    found = chunk_bwd_dqkwg(**plain, h=h, dh=dh, g=g.detach(), scale=0.5, chunk_size=C)
    # The decays are computed in float32, and dg belongs to decays in natural units, both as in fla's kernel.
    wanted = [*wanted[:3], wanted[3] / math.log(2)]
    for name, a, b in zip(("dq", "dk", "dw", "dg"), found, wanted, strict=True):
        assert (a - b).norm() / b.norm() < 1e-5, name


@pytest.mark.slow
def test_two_processes_take_the_same_step_as_one(prepared: Path, tmp_path: Path) -> None:
    """Float32 sums in another order: 1e-5 of the weights' scale."""
    (tmp_path / "one").mkdir()
    one = trainer(prepared)
    one.run(tmp_path / "one", stop_at=1)
    torch.multiprocessing.spawn(_one_of_two, (str(prepared), str(tmp_path)), nprocs=2)
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5, msg=name)


def _one_of_two(rank: int, prepared: str, out: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    run = trainer(Path(prepared))
    run.train_step()
    if rank == 0:
        torch.save(run.model.state_dict(), Path(out) / "two.pt")
    torch.distributed.destroy_process_group()
