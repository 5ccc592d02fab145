"""The demo: one installed document through the whole path, timed and judged.

The source reads a prefix of the longest texts that Python installs (`pydoc_data.topics`), its state is
captured, saved, loaded and translated, and the receiver continues without reading one prefix token. Beside it
stand what it has to be compared with: the receiver reading the prefix itself, the source going on, no prefix
at all, and the state of another document. Nothing here needs a network or a GPU.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from statebridge.bridge import Bridge, Document, ModelPair, token_windows, tokenizer_digest
from statebridge.capture import continue_from, generate_from, prefill
from statebridge.capture.kernels import runnable_kernels
from statebridge.evaluate.arms import Protocol, handovers, score_arms
from statebridge.state import Component, HybridState

#: Arms of the demo's table, in order, with what each one means.
MEANING = {
    "native": "receiver reads the prefix itself",
    "handover": "receiver continues from the translated state",
    "source": "source continues its own prefix",
    "empty": "receiver without any prefix",
    "wrong donor": "receiver continues from another document's state",
}


@dataclass(frozen=True)
class DemoResult:
    """Everything that the demo measured.

    Attributes
    ----------
    document, prefix_tokens, plan
        What was read, how much of it, and the bridge's plan, with "calibrated" where it is.
    seconds
        Wall time of each step; `handover` is capture + translate + first token, `reread` the receiver's own
        reading of the prefix up to its first token.
    nll
        Arm -> mean negative log-likelihood of the true next tokens, nats.
    nll_by_position
        Arm -> the same for each scored position.
    moved_bytes
        Bytes of each component of the state.
    file_bytes
        Size of the state file.
    prefix_tokens_processed
        Prefix tokens that the receiver read after the hand-over, counted at its embedding.
    truth, continuations
        The document's own next words, and arm -> generated text (greedy).
    """

    document: str
    prefix_tokens: int
    targets: int
    plan: str
    seconds: Mapping[str, float]
    nll: Mapping[str, float]
    nll_by_position: Mapping[str, list[float]]
    moved_bytes: Mapping[Component, int]
    file_bytes: int
    prefix_tokens_processed: int
    truth: str
    continuations: Mapping[str, str]

    @property
    def speedup(self) -> float:
        """Time to the first token by re-reading, as a multiple of that by hand-over."""
        return self.seconds["reread"] / self.seconds["handover"]

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        return dataclasses.asdict(self) | {"speedup": self.speedup}


def installed_documents() -> list[Document]:
    """Prose that comes with Python, longest text first."""
    from pydoc_data.topics import topics

    return [
        Document(f"pydoc_data.topics[{name!r}]", text)
        for name, text in sorted(topics.items(), key=lambda item: -len(item[1]))
    ]


def run_demo(
    pair: ModelPair,
    bridge: Bridge,
    protocol: Protocol | None = None,
    *,
    continuation_tokens: int = 24,
    say: Callable[[str], None] = lambda step: None,
) -> DemoResult:
    """Take one document through the whole path and judge the result.

    Parameters
    ----------
    pair, bridge
        The models and their bridge.
    protocol
        Prefix and target lengths; 4,096 and 64 when left out.
    continuation_tokens
        Length of the generated continuations.
    say
        Called with one line per step.

    Raises
    ------
    DocumentError
        When the installed texts are too short for the protocol.
    """
    protocol = protocol or Protocol()
    say(f"Cutting two installed texts into {protocol.length:,} tokens each")
    right, wrong = token_windows(installed_documents(), pair.tokenizer, protocol.length, 2)
    ids = torch.stack([right.ids, wrong.ids])
    prefix, fed = ids[:1, : protocol.prefix], ids[:1, protocol.prefix : protocol.prefix + 1]
    seconds: dict[str, float] = {}
    label = bridge.config.plan + ("" if bridge.calibrator is None else ", calibrated")

    def timed(name: str, step: str, function: Callable[[], Any]) -> Any:
        say(step)
        start = time.perf_counter()
        value = function()
        seconds[name] = time.perf_counter() - start
        return value

    with torch.inference_mode():
        # the first forward pass of a process pays for set-up that belongs to neither way
        for model in (pair.source, pair.receiver):
            prefill(model, prefix[:, :64])
        live = timed(
            "source_prefill",
            f"The source reads {protocol.prefix:,} tokens",
            lambda: prefill(pair.source, prefix, tokenizer=tokenizer_digest(pair.tokenizer)),
        )
        state: HybridState = timed("capture", "Its state is captured", live.state)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            timed("save", "… saved to a file", lambda: state.save(path))
            file_bytes = path.stat().st_size
            state = timed("load", "… loaded again and checked", lambda: HybridState.load(path))
        translated = timed("translate", f"The bridge translates it (plan {label})", lambda: bridge(state))
        first = timed(
            "first_token",
            "The receiver continues without reading the prefix",
            lambda: continue_from(pair.receiver, translated, fed),
        )
        seconds["handover"] = seconds["capture"] + seconds["translate"] + seconds["first_token"]

        def reread() -> Any:
            return continue_from(pair.receiver, prefill(pair.receiver, prefix), fed)

        timed("reread", f"For comparison, the receiver reads the {protocol.prefix:,} tokens itself", reread)
        say("Scoring the next true tokens under every arm")
        # rows are scored together so that each has the other as its wrong donor; row 0 is the one reported
        controls = ("source", "empty", "wrong donor")
        scores = score_arms(pair, ids, protocol, bridge=bridge, controls=controls)
        say("Letting every arm write on")
        texts = _continuations(pair, bridge, translated, state, ids, protocol, continuation_tokens)
    hand = next(iter(handovers(bridge)))  # the bridge as it is: calibrated, where it has a calibrator
    by_position = {
        ("handover" if arm == hand else arm): found.nll[0].tolist() for arm, found in scores.items()
    }
    return DemoResult(
        document=right.id,
        prefix_tokens=protocol.prefix,
        targets=protocol.targets,
        plan=label,
        seconds=seconds,
        nll={arm: sum(by_position[arm]) / protocol.targets for arm in MEANING},
        nll_by_position={arm: by_position[arm] for arm in MEANING},
        moved_bytes=state.nbytes(),
        file_bytes=file_bytes,
        prefix_tokens_processed=first.prefix_tokens_processed,
        truth=pair.tokenizer.decode(ids[0, protocol.prefix + 1 :][:continuation_tokens]),
        continuations=texts,
    )


def _continuations(
    pair: ModelPair,
    bridge: Bridge,
    translated: HybridState,
    source: HybridState,
    ids: torch.Tensor,
    protocol: Protocol,
    new_tokens: int,
) -> dict[str, str]:
    prefix, fed = ids[:1, : protocol.prefix], ids[:1, protocol.prefix : protocol.prefix + 1]
    wrong = bridge(prefill(pair.source, ids[1:, : protocol.prefix]).state())
    states = {
        "native": (pair.receiver, prefill(pair.receiver, prefix).state()),
        "handover": (pair.receiver, translated),
        "source": (pair.source, source),
        "wrong donor": (pair.receiver, wrong),
    }
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    texts = {}
    for arm, (model, state) in states.items():
        texts[arm] = pair.tokenizer.decode(generate_from(model, state, fed, **options).new_ids[0])
    with runnable_kernels(pair.receiver):
        alone = pair.receiver.generate(fed, attention_mask=torch.ones_like(fed), **options)
    texts["empty"] = pair.tokenizer.decode(alone[0, 1:])
    return {arm: texts[arm] for arm in MEANING}
