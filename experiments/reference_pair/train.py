"""The training loop of the reference pair: next-token loss over text windows and recall documents.

    loss = sum_t w_t nll_t / sum_t w_t,      w = answer_weight on answers of recall documents, else 1

One process a device, gradients summed over processes; float32 weights, bf16 compute on a GPU. Every step
is a function of the config and the step number alone, and a checkpoint holds weights, optimizer, step
and random state: a resumed run equals an uninterrupted one (bit-exact on CPU). Knows neither how text
became tokens (data) nor how models are built and grown (model).
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from experiments.reference_pair import fast_path
from experiments.reference_pair.config import TrainConfig
from experiments.reference_pair.data import visits, window_starts
from experiments.reference_pair.model import build, grow

COLUMNS = ("step", "tokens", "lr", "text_nll", "recall_nll", "answer_nll", "gradient_norm", "seconds")


class Batches:
    """The sequences of each step, taken from arrays that live on the device."""

    def __init__(self, config: TrainConfig, folder: Path, device: torch.device) -> None:
        def load(name: str) -> torch.Tensor:
            array = np.load(folder / f"{name}.npy")
            return torch.from_numpy(array.astype(np.int16) if array.dtype == np.uint16 else array).to(device)

        self.config = config
        self.device = device
        self.text = load("tokens")
        lengths = {phase.length for phase in config.phases} if config.recall_share else set()
        self.recall = {n: (load(f"recall_{n}"), load(f"answers_{n}")) for n in sorted(lengths)}

    def step(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids ``[B, T]``, answer mask ``[B, T]`` and recall flag ``[B]`` of a step, all on the device."""
        phase_index = 0
        for phase_index, phase in enumerate(self.config.phases):  # noqa: B007
            if number < phase.steps:
                break
            number -= phase.steps
        B, T, share = phase.sequences, phase.length, self.config.recall_share
        seen, until = (math.floor((number + i) * B * share) for i in (0, 1))
        recall, text = until - seen, B - (until - seen)
        seed = self.config.seed
        starts = window_starts(len(self.text), T, seed, 2 * phase_index, number * B - seen, text)
        index = torch.from_numpy(starts).to(self.device, non_blocking=True)[:, None]
        ids = self.text[index + torch.arange(T, device=self.device)].long()
        mask = torch.zeros_like(ids)
        if recall:
            documents, answers = self.recall[T]
            rows = [row for _, row in visits(len(documents), seed, 2 * phase_index + 1, seen, recall)]
            picked = torch.tensor(rows, device=self.device)
            ids = torch.cat([ids, documents[picked].long()])
            mask = torch.cat([mask, answers[picked].long()])
        return ids, mask, torch.arange(B, device=self.device) >= text


def learning_rate(config: TrainConfig, tokens: int) -> float:
    """Warm up, stay, fall as a half cosine; a function of the tokens seen."""
    if tokens < config.warmup_tokens:
        return config.lr * (tokens + 1) / config.warmup_tokens
    begin = max(config.warmup_tokens, config.decay_from * config.tokens)
    done = min(1.0, max(0.0, (tokens - begin) / max(1.0, config.tokens - begin)))
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def token_nll(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood ``[N]`` of labels ``[N]`` from hidden states ``[N, d]`` and the tied head."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="none")


class Trainer:
    """Weights, optimizer and step of one run on one device."""

    def __init__(
        self,
        model: Qwen3_5ForCausalLM,
        config: TrainConfig,
        data: Path,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        self.config = config
        self.device = device
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.model = model.to(device).train()
        self.batches = Batches(config, data, device)
        self.step = 0
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        matrices = [p for p in self.parameters if p.ndim == 2]
        rest = [p for p in self.parameters if p.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": rest, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            fused=device.type == "cuda",
        )
        # One buffer behind all gradients: one collective a step.
        self.gradient = torch.zeros(sum(p.numel() for p in self.parameters), device=device)
        at = 0
        for p in self.parameters:
            p.grad = self.gradient[at : at + p.numel()].view_as(p)
            at += p.numel()
        self.nll = torch.compile(token_nll, dynamic=False) if compiled else token_nll
        self.tokens = 0

    def train_step(self) -> torch.Tensor:
        """Do one step; return sums over this process: text nll, text count, recall, count, answers, count, norm."""
        ids, mask, is_recall = self.batches.step(self.step)
        weight = 1.0 + (self.config.answer_weight - 1.0) * mask[:, 1:].float()
        total = weight.sum()
        mine = slice(self.rank, None, self.world)
        weight, answers, is_recall = weight[mine], mask[mine, 1:].bool(), is_recall[mine, None]
        ids_here = ids[mine]
        self.gradient.zero_()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            embedded = self.model.model.embed_tokens(ids_here)
            if self.device.type == "cuda":
                embedded = embedded.bfloat16()  # else the residual stream stays float32 under autocast
            hidden = self.model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
            flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
            nll = self.nll(flat, self.model.lm_head.weight, ids_here[:, 1:].reshape(-1)).view_as(weight)
        ((nll * weight).sum() / total).backward()
        if self.world > 1:
            dist.all_reduce(self.gradient)
        norm = self.gradient.norm()
        self.gradient.mul_((self.config.clip / (norm + 1e-6)).clamp(max=1.0))
        lr = learning_rate(self.config, self.tokens)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.step += 1
        self.tokens += ids.numel()
        kinds = (~is_recall).expand_as(answers), is_recall & ~answers, answers
        nll = nll.detach()
        return torch.stack([x for kind in kinds for x in ((nll * kind).sum(), kind.sum().float())] + [norm])

    def save(self, path: Path) -> None:
        """Write everything a resumed run needs, atomically (first process only)."""
        if self.rank == 0:
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "tokens": self.tokens,
                "torch_rng": torch.get_rng_state(),
            }
            torch.save(state, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of the same config."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens = state["step"], state["tokens"]
        torch.set_rng_state(state["torch_rng"].cpu())

    def run(self, out: Path, stop_at: int | None = None) -> None:
        """Train to the end of the config (or to step ``stop_at``), logging and saving into ``out``."""
        checkpoint = out / "checkpoint.pt"
        if checkpoint.exists():
            self.load(checkpoint)
        began, first_tokens, sums = time.perf_counter(), self.tokens, []
        last = self.config.steps if stop_at is None else min(stop_at, self.config.steps)
        while self.step < last:
            sums.append(self.train_step())
            if self.step % self.config.log_every == 0 or self.step == last:
                self._log(out / "loss.csv", torch.stack(sums).sum(0), len(sums), time.perf_counter() - began)
                sums = []
                if self.step <= 4 * self.config.log_every and self.rank == 0:
                    speed = (self.tokens - first_tokens) / (time.perf_counter() - began)
                    print(
                        f"step {self.step} of {self.config.steps}: {speed:,.0f} tokens/s on average",
                        flush=True,
                    )
            if self.step % self.config.save_every == 0 or self.step == last:
                self.save(checkpoint)

    def _log(self, path: Path, sums: torch.Tensor, steps: int, seconds: float) -> None:
        if self.world > 1:
            dist.all_reduce(sums)
        text, text_n, recall, recall_n, answer, answer_n, norm = sums.tolist()
        means = [
            a / n if n else float("nan") for a, n in ((text, text_n), (recall, recall_n), (answer, answer_n))
        ]
        lr = learning_rate(self.config, self.tokens)
        row = [self.step, self.tokens, f"{lr:.3e}", *(f"{m:.4f}" for m in means)]
        row += [f"{norm / steps / self.world:.3f}", f"{seconds:.1f}"]
        if self.rank == 0:
            if not math.isfinite(text):
                raise FloatingPointError(f"the loss is not finite at step {self.step}")
            fresh = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if fresh:
                    writer.writerow(COLUMNS)
                writer.writerow(row)
            print(" ".join(f"{n}={v}" for n, v in zip(COLUMNS, row, strict=True)), flush=True)


def save_model(model: Qwen3_5ForCausalLM, tokenizer: Path, out: Path) -> None:
    """Write bf16 weights, generation config and tokenizer in transformers' layout."""
    copy = Qwen3_5ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.config.dtype = torch.bfloat16
    words = AutoTokenizer.from_pretrained(tokenizer)
    # A chat turn ends a generation as well as a document does.
    copy.generation_config.eos_token_id = [words.eos_token_id, words.convert_tokens_to_ids("<|im_end|>")]
    copy.save_pretrained(out)
    words.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder that data.py wrote")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint, loss.csv and the finished model")
    parser.add_argument(
        "--grow-from", type=Path, help="folder of the source model; without it, fresh weights"
    )
    parser.add_argument("--stop-at", type=int, help="stop after this step, as an interruption would")
    parser.add_argument("--compile", action="store_true", help="torch.compile the pointwise parts (GPU)")
    args = parser.parse_args()
    config = TrainConfig.from_yaml(args.config)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
        fast_path.install(args.compile)
        gaps = fast_path.check(device, config.shape.linear_num_value_heads, config.shape.linear_key_head_dim)
        gaps["convolution"] = fast_path.check_convolution(device, 512, config.shape.linear_conv_kernel_dim)
        print("kernel check:", {name: f"{gap:.4f}" for name, gap in gaps.items()}, flush=True)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(config.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    if args.grow_from:
        model = grow(Qwen3_5ForCausalLM.from_pretrained(args.grow_from, dtype=torch.float32), config.shape)
    else:
        model = build(config.shape, tokenizer.eos_token_id, tokenizer.pad_token_id)
    print(
        f"{model.num_parameters():,} parameters, {config.tokens:,} tokens in {config.steps} steps", flush=True
    )
    trainer = Trainer(model, config, args.data, device, compiled=args.compile and device.type == "cuda")
    trainer.run(args.out, args.stop_at)
    if trainer.step == config.steps and trainer.rank == 0:
        save_model(trainer.model, args.tokenizer, args.out / "model")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
