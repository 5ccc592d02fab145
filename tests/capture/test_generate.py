"""generate_from: every way of transformers' generate, and no prefix token read."""

from __future__ import annotations

import pytest
import tiny
import tokenizers
import torch
import transformers
from models import LAYOUTS, run, snapshot, unmoved

import statebridge
from statebridge.capture.model import cache_keyword
from statebridge.capture.walker import new_cache
from statebridge.errors import CaptureError

PREFIX, GIVEN, NEW = 40, 3, 8


def greedy(model, state, given: torch.Tensor, steps: int = NEW) -> torch.Tensor:
    """Greedy decoding by hand, one token a call."""
    live = statebridge.continue_from(model, state, given)
    tokens = []
    for _ in range(steps):
        token = live.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token)
        live = statebridge.continue_from(model, live, token)
    return torch.cat(tokens, dim=1)


@pytest.fixture(params=LAYOUTS)
def family(request) -> str:
    return request.param


def setup(family: str, batch: int = 2):
    model = tiny.build(family)
    ids = tiny.ids(batch, PREFIX + GIVEN, seed=11)
    return model, statebridge.prefill(model, ids[:, :PREFIX]).state(), ids


def without_end(**options) -> dict:
    return {"do_sample": False, "eos_token_id": None, **options}


@pytest.mark.parametrize("any_family", tiny.available())
def test_greedy_equals_a_loop_by_hand(any_family: str) -> None:
    model, state, ids = setup(any_family)
    before = snapshot(state)
    got = statebridge.generate_from(model, state, ids[:, PREFIX:], **without_end(max_new_tokens=NEW))
    assert torch.equal(got.new_ids, greedy(model, state, ids[:, PREFIX:]))
    assert got.prefix_tokens_processed == 0
    assert got.new_tokens_processed == GIVEN + NEW - 1  # the last token is never read
    assert torch.equal(got.output.sequences[:, : PREFIX + GIVEN], ids)
    assert unmoved(state, before)


def test_sampling_is_the_models_own(family: str) -> None:
    """Seeded, bit-equal to sampling from the live model over the full ids."""
    model, state, ids = setup(family)
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.3, "eos_token_id": None}
    torch.manual_seed(5)
    got = statebridge.generate_from(model, state, ids[:, PREFIX:], **options)
    torch.manual_seed(5)
    again = statebridge.generate_from(model, state, ids[:, PREFIX:], **options)
    assert torch.equal(got.new_ids, again.new_ids)
    _, cache = run(model, ids[:, :PREFIX])
    if family == "jamba":
        _, cache = run(model, ids[:, PREFIX:-1], cache)
    torch.manual_seed(5)
    live = model.generate(ids, use_cache=True, **{cache_keyword(model): cache}, **options)
    assert torch.equal(live[:, PREFIX + GIVEN :], got.new_ids)
    assert got.prefix_tokens_processed == 0


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3},
        {"num_beams": 2, "length_penalty": 2.0, "early_stopping": True, "eos_token_id": 7},
    ],
)
def test_beam_search_equals_beam_search_over_everything(family: str, options: dict) -> None:
    """The same beams as by the live model that reads the full ids itself."""
    model, state, ids = setup(family)
    options = without_end(max_new_tokens=NEW, **options)
    got = statebridge.generate_from(model, state, ids[:, PREFIX:], **options)
    expected = model.generate(ids, **options)
    assert torch.equal(got.output.sequences, expected)
    assert got.prefix_tokens_processed == 0
    returned = options.get("num_return_sequences", 1)
    assert got.new_ids.shape[0] == 2 * returned


def test_several_samples_a_row(family: str) -> None:
    model, state, ids = setup(family)
    torch.manual_seed(1)
    got = statebridge.generate_from(
        model,
        state,
        ids[:, PREFIX:],
        max_new_tokens=NEW,
        do_sample=True,
        num_return_sequences=3,
        eos_token_id=None,
    )
    assert got.new_ids.shape == (6, NEW)
    assert len({tuple(row) for row in got.new_ids.tolist()}) > 1
    assert got.prefix_tokens_processed == 0


def test_processors_see_the_prefix(family: str) -> None:
    """A repetition penalty counts tokens that only the prefix holds."""
    model, state, ids = setup(family, batch=1)
    options = without_end(max_new_tokens=NEW, repetition_penalty=3.0)
    got = statebridge.generate_from(model, state, ids[:, PREFIX:], **options)
    assert torch.equal(got.output.sequences, model.generate(ids, **options))
    assert not torch.equal(got.new_ids, greedy(model, state, ids[:, PREFIX:]))


def words() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that writes token 17 as "w17"."""
    vocabulary = {f"w{i}": i for i in range(tiny.VOCAB)} | {
        "abcdef": tiny.VOCAB
    }  # transformers probes with it
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


def test_streamers_stop_tokens_and_stop_strings(family: str) -> None:
    model, state, ids = setup(family, batch=1)
    plain = greedy(model, state, ids[:, PREFIX:])[0].tolist()

    class Collect(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.pieces: list[torch.Tensor] = []

        def put(self, value: torch.Tensor) -> None:
            self.pieces.append(value)

        def end(self) -> None:
            self.pieces.append(None)

    streamer = Collect()
    statebridge.generate_from(
        model, state, ids[:, PREFIX:], streamer=streamer, **without_end(max_new_tokens=NEW)
    )
    assert torch.equal(streamer.pieces[0].flatten(), ids.flatten())  # the whole prompt comes first, once
    assert [int(piece) for piece in streamer.pieces[1:-1]] == plain
    stop = plain[2]
    stopped = statebridge.generate_from(
        model, state, ids[:, PREFIX:], eos_token_id=stop, do_sample=False, max_new_tokens=NEW
    )
    ended = plain[: plain.index(stop) + 1]
    assert stopped.new_ids[0].tolist() == ended
    assert stopped.prefix_tokens_processed == 0
    stopped = statebridge.generate_from(
        model,
        state,
        ids[:, PREFIX:],
        stop_strings=[f"w{stop}"],
        tokenizer=words(),
        **without_end(max_new_tokens=NEW),
    )
    assert stopped.new_ids[0].tolist() == ended


def test_padded_rows_generate_like_rows_alone(family: str) -> None:
    """Rows of different lengths, each as by itself (greedy ids; the logits agree within rounding)."""
    model = tiny.build(family)
    ids = tiny.ids(3, PREFIX, seed=21)
    lengths = [PREFIX, PREFIX - 7, 5]
    rows = [
        statebridge.prefill(model, row[None, PREFIX - n :]).state()
        for row, n in zip(ids, lengths, strict=True)
    ]
    given = tiny.ids(3, GIVEN, seed=22)
    together = statebridge.HybridState.merge(rows)
    assert together.seen_tokens.tolist() == lengths
    got = statebridge.generate_from(model, together, given, **without_end(max_new_tokens=NEW))
    for b, row in enumerate(rows):
        alone = statebridge.generate_from(model, row, given[b : b + 1], **without_end(max_new_tokens=NEW))
        assert torch.equal(got.new_ids[b : b + 1], alone.new_ids)
    assert got.prefix_tokens_processed == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"prefill_chunk_size": 2}, "prefill_chunk_size"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"use_cache": False}, "use_cache"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask"),
        ({"position_ids": torch.ones(2, 3)}, "position_ids"),
        ({"generation_config": transformers.GenerationConfig(cache_implementation="static")}, "cache_impl"),
    ],
)
def test_options_that_would_read_again_are_refused(options: dict, named: str) -> None:
    model, state, ids = setup("qwen3_5")
    with pytest.raises(CaptureError, match=named):
        statebridge.generate_from(model, state, ids[:, PREFIX:], **options)


def test_a_state_without_keys_cannot_generate() -> None:
    model, state, ids = setup("qwen3_5")
    with pytest.raises(CaptureError, match="without K"):
        statebridge.generate_from(model, state.without("K"), ids[:, PREFIX:], allow_partial=True)


@pytest.mark.parametrize("keep", [0, 5])
def test_the_counter_sees_a_prefix_that_is_read_again(monkeypatch, keep: int) -> None:
    """Planted fault: the cache that generate is given is empty, or holds five tokens only."""
    from statebridge.capture import generation

    model, state, ids = setup("llama")
    short = statebridge.prefill(model, ids[:, :keep]).cache if keep else None

    def forgetful(*args, **kwargs):
        return short if keep else new_cache(model)

    monkeypatch.setattr(generation, "restore", forgetful)
    got = statebridge.generate_from(model, state, ids[:, PREFIX:], **without_end(max_new_tokens=4))
    assert got.prefix_tokens_processed == PREFIX - keep
