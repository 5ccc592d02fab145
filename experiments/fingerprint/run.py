"""Measure what runtimes need, and whether they return: language, video, the planted toy, conformance.

    python -m experiments.fingerprint.run planted
    python -m experiments.fingerprint.run video
    python -m experiments.fingerprint.run language --books FOLDER --model FOLDER --name source
    python -m experiments.fingerprint.run conformance --books FOLDER --source FOLDER --receiver FOLDER --bridge FOLDER

Each part writes `results/<part>.json`; `plot.py` draws them.
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments.fingerprint import planted
from statebridge.bridge.config import DocumentsConfig
from statebridge.bridge.documents import load_documents, token_windows
from statebridge.capture.load import load_model
from statebridge.sessions import BufferSpec
from statebridge.sessions.fingerprint import Fingerprint, max_difference

#: Tokens after the prefix whose logits are compared.
AFTER = 9
RESULTS = Path(__file__).parent / "results"
Books = Annotated[Path, typer.Option(help="Folder of text files.")]
Model = Annotated[str, typer.Option(help="Folder of a model.")]
app = typer.Typer(add_completion=False)


def by_memory(spec: BufferSpec) -> str:
    """Two groups over all layers, flags with what they switch on: attention, recurrent."""
    if not spec.name.startswith("layers."):
        return spec.name
    return "attention" if spec.name.endswith((".key", ".value")) else "recurrent"


@app.command()
def language(
    books: Books,
    model: Model,
    name: Annotated[str, typer.Option(help="As the result is called.")],
    lengths: str = "64,512,4096",
    out: Path = RESULTS,
) -> None:
    """What a language model needs: by component, by layer, by kind of memory, and when it may read again."""
    from statebridge.sessions.fingerprint.model import by_component, by_layer, fingerprint_model

    tokens = [int(length) for length in lengths.split(",")]
    loaded, tokenizer = load_model(model, dtype=torch.float32)
    windows = _windows(books, tokenizer, max(tokens) + AFTER)
    result: dict[str, Any] = {"lengths": tokens, "next_tokens": AFTER}
    runs: dict[str, dict[str, Any]] = {
        "component, logits": {"distance": max_difference, "eps": 1e-3, "group": by_component},
        "component, KL": {"group": by_component},
        "memory, KL": {"group": by_memory},
        "layer, KL": {"group": by_layer},
        "component, reading again, KL": {"group": by_component, "derive": True},
    }
    for what, options in runs.items():
        begun = time.perf_counter()
        found = fingerprint_model(loaded, windows, tokens, **options)
        _say(f"{name}: {what}", found, begun)
        result[what] = found.to_json()
    _write(out, f"language_{name}", result)


@app.command()
def video(out: Path = RESULTS) -> None:
    """What a causal video-diffusion transformer needs, with a deterministic and a stochastic sampler."""
    from experiments.fingerprint import anyflow

    model = anyflow.tiny_model()
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    for sampler in ("deterministic", "stochastic"):
        begun = time.perf_counter()
        found = Fingerprint.discover(
            functools.partial(anyflow.Rollout, model, sampler == "stochastic"),
            {chunks: functools.partial(_roll, seed=1, chunks=chunks) for chunks in (1, 2, 4)},
            lambda runtime: runtime.step(2).numpy(),
            max_difference,
            1e-6,
            other={chunks: functools.partial(_roll, seed=2, chunks=chunks) for chunks in (1, 2, 4)},
            group=lambda spec: spec.name.partition(".")[0],
        )
        _say(sampler, found, begun)
        result[sampler] = found.to_json()
    _write(out, "video", result)


@app.command("planted")
def planted_toy(out: Path = RESULTS) -> None:
    """The toy whose answer is known: a pair of buffers that hide each other among others."""
    begun = time.perf_counter()
    found = Fingerprint.discover(
        planted.Planted,
        {n: functools.partial(planted.anchor, steps=n) for n in (2, 6, 20)},
        planted.probe,
        max_difference,
        1e-9,
        other={n: functools.partial(planted.anchor, seed=2, steps=n) for n in (2, 6, 20)},
    )
    _say("planted", found, begun)
    if set(found.needed) != planted.NEEDED:
        raise SystemExit(f"expected {sorted(planted.NEEDED)}")
    _write(out, "planted", {"planted": found.to_json()})


@app.command()
def conformance(
    books: Books,
    source: Model,
    receiver: Model,
    bridge: Annotated[Path, typer.Option(help="Folder of the bridge.")],
    out: Path = RESULTS,
) -> None:
    """Whether sessions of the source return exactly, and what of the meaning a hand-over keeps."""
    from experiments.fingerprint.returns import exact_returns, meaning_after_handover

    result = {}
    for name, measure in (("exact", exact_returns), ("meaning", meaning_after_handover)):
        verdict = measure(books, source, receiver, bridge)
        print(f"## {name}\n{verdict.markdown()}\n", flush=True)
        result[name] = verdict.to_json()
    _write(out, "conformance", result)


def _windows(books: Path, tokenizer: Any, length: int) -> torch.Tensor:
    """Four books' tokens [4, length], a seeded window of each."""
    config = DocumentsConfig(source=str(books), window="random")
    windows = token_windows(load_documents(config), tokenizer, length, 4, config.window)
    return torch.stack([window.ids for window in windows])


def _roll(runtime: Any, seed: int, chunks: int) -> None:
    runtime.begin(seed)
    runtime.step(chunks)


def _say(name: str, found: Fingerprint, begun: float) -> None:
    seconds = time.perf_counter() - begun
    print(f"## {name} ({seconds:.0f} s, greedy: {found.greedy})\n{found.markdown()}\n", flush=True)


def _write(out: Path, name: str, result: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    app()
