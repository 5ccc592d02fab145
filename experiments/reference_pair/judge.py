"""Judges a pair on held-out books: does it behave like the real one, before any map is fitted?

The arms, the paired intervals and the recall task are those of `statebridge evaluate`, with a bridge that copies
everything: what two models share without help. Added here is the NLL by position in a long context, which shows
whether a model still gains from text that lies far back. Knows two model folders of equal state geometry and a
folder of texts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 (its usual name)

from statebridge.bridge import Bridge, DocumentsConfig, ModelPair, TokenWindow, load_documents, token_windows
from statebridge.evaluate.config import EvaluateConfig, RecallConfig
from statebridge.evaluate.report import write_report
from statebridge.evaluate.run import evaluate


@torch.inference_mode()
def nll_by_position(model: Any, windows: list[TokenWindow], bins: int = 8) -> list[float]:
    """Mean NLL, nats per token, in equal stretches of long windows ``[T]``, read one by one."""
    device = next(model.parameters()).device
    rows = []
    for window in windows:
        ids = window.ids[None].to(device)
        hidden = model.model(ids, use_cache=False).last_hidden_state[0, :-1]  # [T - 1, hidden]
        # logits of a stretch at a time: those of the whole window are the largest tensor there would be
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
    parser.add_argument("--count", type=int, default=64, help="books that are scored")
    parser.add_argument("--skip", type=int, default=0, help="books before them")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the prefix")
    parser.add_argument("--recall-items", type=int, default=16, help="questions a depth; 0 leaves recall out")
    parser.add_argument("--long", type=int, default=4, help="books for the NLL by position; 0 leaves it out")
    parser.add_argument("--long-length", type=int, default=16384, help="tokens of such a window")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    args = parser.parse_args()
    pair = ModelPair.from_pretrained(
        str(args.source), str(args.receiver), dtype=args.dtype, device_map=args.device
    )
    documents = DocumentsConfig(source=str(args.books), window="start")
    config = EvaluateConfig(
        documents=documents,
        count=args.count,
        skip=args.skip,
        prefix=args.length,
        batch_size=args.batch,
        plans=("DDD",),
        windows=tuple(w for w in (64, 256, 1024) if w < args.length),
        recall=RecallConfig(items_per_depth=args.recall_items),
        seed=args.seed,
    )

    def say(stage: str, done: int, total: int) -> None:
        print(f"{stage} {done} of {total}", file=sys.stderr, flush=True)

    bridge = Bridge.direct(pair.source_identity, pair.receiver_identity)
    evaluate(pair, bridge, config, out=args.out, progress=say)
    print((write_report(args.out)[1]).read_text(encoding="utf-8"))
    if args.long:
        windows = token_windows(load_documents(documents), pair.tokenizer, args.long_length, args.long)
        found: dict[str, Any] = {"books": [window.id for window in windows], "length": args.long_length}
        for name, model in (("source", pair.source), ("receiver", pair.receiver)):
            say(f"NLL by position, {name}", 0, len(windows))
            found[name] = nll_by_position(model, windows)
        (args.out / "nll_by_position.json").write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
