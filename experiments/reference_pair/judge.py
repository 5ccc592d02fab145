"""Judges a pair on held-out books: does it behave like the real one?

Every arm scores the same targets: after a prefix of L tokens the model reads x_{L+1} (the bridge token)
.. x_{L+64} and predicts x_{L+2} .. x_{L+65}. Arms: native and source (read the prefix), empty (no prefix),
DDD (the source's K, R and C as they are in the receiver), KV only, wrong donor (DDD of the next document)
and windows (the receiver reads only the last W tokens). Then exact-match recall by depth, and NLL by
position in 16K. Knows two model folders of equal state geometry and a folder of texts, nothing else.

    NCR = (NLL_empty − NLL_arm) / (NLL_empty − NLL_native)
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from statebridge.evaluate.recall import RecallItem, RecallTask, greedy_match

WINDOWS = (64, 256, 1024)


@torch.inference_mode()
def prefill(model: torch.nn.Module, ids: torch.Tensor) -> DynamicCache:
    """Read ``[B, T]`` ids into a fresh cache in one pass."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.inference_mode()
def proceed(model: torch.nn.Module, cache: DynamicCache | None, ids: torch.Tensor) -> torch.Tensor:
    """Return logits ``[B, T, vocabulary]`` (float32) of ids read after a copy of the cache."""
    cache = DynamicCache(config=model.config) if cache is None else copy.deepcopy(cache)
    return model(ids, past_key_values=cache, use_cache=True).logits.float()


def attention_only(cache: DynamicCache, model: torch.nn.Module) -> DynamicCache:
    """Return a cache of the model that holds the keys and values alone."""
    out = DynamicCache(config=model.config)
    for new, old in zip(out.layers, cache.layers, strict=True):
        if getattr(old, "keys", None) is not None:
            new.update(old.keys.clone(), old.values.clone())
    return out


def arms(
    source: torch.nn.Module, receiver: torch.nn.Module, prefix: torch.Tensor
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Map arm names to functions from next ids ``[B, T]`` to logits; prefixes ``[B, L]`` are read once."""
    native, own = prefill(receiver, prefix), prefill(source, prefix)
    kv_only = attention_only(own, receiver)
    return {
        "native": lambda ids: proceed(receiver, native, ids),
        "source": lambda ids: proceed(source, own, ids),
        "empty": lambda ids: proceed(receiver, None, ids),
        "DDD": lambda ids: proceed(receiver, own, ids),
        "KV only": lambda ids: proceed(receiver, kv_only, ids),
        "wrong donor": lambda ids: proceed(receiver, own, ids.roll(-1, 0)).roll(1, 0),
        **{
            f"window {w}": (lambda ids, w=w: proceed(receiver, prefill(receiver, prefix[:, -w:]), ids))
            for w in WINDOWS
        },
    }


def score_documents(source, receiver, documents: list[list[int]], length: int, targets: int, batch: int):  # type: ignore[no-untyped-def]
    """Return mean NLL per document and arm ``{arm: [n]}`` and the top-1 agreement of each arm with native."""
    nll: dict[str, list[float]] = {}
    agreement: dict[str, list[float]] = {}
    device = next(receiver.parameters()).device
    # A batch of one would be its own wrong donor.
    starts = list(range(0, len(documents), batch))
    if len(documents) % batch == 1 and len(starts) > 1:
        starts.pop()
    for i, at in enumerate(starts):
        print(f"documents {at} of {len(documents)}", file=sys.stderr, flush=True)
        rows = documents[at : (starts[i + 1] if i + 1 < len(starts) else None)]
        ids = torch.tensor([row[: length + targets + 1] for row in rows], device=device)
        best = None
        for name, run in arms(source, receiver, ids[:, :length]).items():
            logits = run(ids[:, length:-1])
            loss = F.cross_entropy(logits.transpose(1, 2), ids[:, length + 1 :], reduction="none")
            nll.setdefault(name, []).extend(loss.mean(1).tolist())
            best = logits.argmax(-1) if best is None else best
            agreement.setdefault(name, []).extend((logits.argmax(-1) == best).float().mean(1).tolist())
    return {k: np.array(v) for k, v in nll.items()}, {k: float(np.mean(v)) for k, v in agreement.items()}


def summary(nll: dict[str, np.ndarray], seed: int) -> dict[str, dict[str, object]]:
    """Means, differences to native and NCR with paired bootstrap intervals over documents."""
    n = len(nll["native"])
    draws = np.random.default_rng(seed).integers(0, n, size=(10_000, n))

    def interval(values: np.ndarray) -> list[float]:
        return [float(x) for x in np.percentile(values, [2.5, 97.5])]

    means = {arm: values[draws].mean(1) for arm, values in nll.items()}
    native, empty = nll["native"], nll["empty"]
    out: dict[str, dict[str, object]] = {}
    for arm, values in nll.items():
        ncr = (means["empty"] - means[arm]) / (means["empty"] - means["native"])
        out[arm] = {
            "nll": float(values.mean()),
            "excess": float((values - native).mean()),
            "excess_interval": interval(means[arm] - means["native"]),
            "minus_source": float((values - nll["source"]).mean()),
            "minus_source_interval": interval(means[arm] - means["source"]),
            "minus_empty": float((values - empty).mean()),
            "minus_empty_interval": interval(means[arm] - means["empty"]),
            "ncr": float((empty.mean() - values.mean()) / (empty.mean() - native.mean())),
            "ncr_interval": interval(ncr),
        }
    return out


def score_recall(source, receiver, task: RecallTask, batch: int) -> dict[str, dict[int, float]]:  # type: ignore[no-untyped-def]
    """Exact match by arm and depth."""
    device = next(receiver.parameters()).device
    hits: dict[str, dict[int, list[bool]]] = {}
    items: list[RecallItem] = list(task.items())
    for at in range(0, len(items), batch):
        rows = items[at : at + batch]
        print(f"recall items {at} of {len(items)}", file=sys.stderr, flush=True)
        prefix = torch.tensor([row.prefix_ids for row in rows], device=device)
        asked = [[*row.prompt_ids, *row.answer_ids] for row in rows]
        longest = max(map(len, asked))  # padding to the right changes nothing before it
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in asked], device=device)
        for name, run in arms(source, receiver, prefix).items():
            for row, logits in zip(rows, run(ids), strict=True):
                hits.setdefault(name, {}).setdefault(row.depth, []).append(greedy_match(logits, row))
    return {arm: {d: float(np.mean(v)) for d, v in by_depth.items()} for arm, by_depth in hits.items()}


@torch.inference_mode()
def nll_by_position(model, documents: list[list[int]], length: int, bins: int = 8) -> list[float]:  # type: ignore[no-untyped-def]
    """Mean NLL in equal stretches of a long context, document by document."""
    device = next(model.parameters()).device
    rows = []
    for document in documents:
        ids = torch.tensor([document[:length]], device=device)
        hidden = model.model(ids, use_cache=False).last_hidden_state[0, :-1]
        parts = zip(hidden.split(2048), ids[0, 1:].split(2048), strict=True)
        rows.append(
            torch.cat([F.cross_entropy(model.lm_head(h).float(), t, reduction="none") for h, t in parts])
        )
    return [float(part.mean()) for part in torch.stack(rows).mean(0).tensor_split(bins)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("receiver", type=Path)
    parser.add_argument("books", type=Path, help="folder of held-out UTF-8 .txt files")
    parser.add_argument("--half", choices=("first", "final", "all"), default="first")
    parser.add_argument("--limit", type=int, help="at most so many books, evenly spaced")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--targets", type=int, default=64)
    parser.add_argument(
        "--offsets", type=int, nargs="+", default=[0], help="where in the book the prefix starts"
    )
    parser.add_argument("--recall-items", type=int, default=20, help="items a depth; 0 leaves recall out")
    parser.add_argument(
        "--long", type=int, default=4, help="documents for NLL by position in 16K; 0 leaves it out"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.receiver)
    source, receiver = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype).to(device).eval()
        for folder in (args.source, args.receiver)
    )
    files = sorted(args.books.glob("*.txt"))
    middle = len(files) // 2
    files = {"first": files[:middle], "final": files[middle:], "all": files}[args.half]
    if args.limit is not None:
        files = [files[i * len(files) // args.limit] for i in range(args.limit)]
    texts = [path.read_text(encoding="utf-8") for path in files]
    ids = [tokenizer.encode(text[:140_000], add_special_tokens=False) for text in texts]
    need = max(args.offsets) + args.length + args.targets + 1
    kept = [row for row in ids if len(row) >= need]
    result: dict[str, object] = {
        "half": args.half,
        "documents": len(kept),
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    for offset in args.offsets:
        rows = [row[offset:] for row in kept]
        nll, agreement = score_documents(source, receiver, rows, args.length, args.targets, args.batch)
        table = summary(nll, args.seed)
        for arm, row in table.items():
            row["top1"] = agreement[arm]
            print(
                f"{arm:12s} nll {row['nll']:.4f} excess {row['excess']:+.4f} ncr {row['ncr']:+.3f} {row['top1']:.3f}"
            )
        result[f"offset {offset}"] = table
        result[f"documents at offset {offset}"] = {arm: values.tolist() for arm, values in nll.items()}
    if args.recall_items:
        filler = [text[:140_000] for text in texts]
        task = RecallTask(
            tokenizer, filler, length=args.length, items_per_depth=args.recall_items, seed=args.seed
        )
        result["recall"] = score_recall(source, receiver, task, args.batch)
        for arm, row in result["recall"].items():
            print(f"recall {arm:12s} {row}")
    if args.long:
        rows = [row for row in ids if len(row) >= 16384][: args.long]
        result["nll by position"] = {
            name: nll_by_position(model, rows, 16384)
            for name, model in (("source", source), ("receiver", receiver))
        }
        print("nll by position", result["nll by position"])
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
