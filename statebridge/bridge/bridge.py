"""The Bridge: what takes a state of the source to a state of the receiver.

    receiver_state = bridge(source_state)

A plan says per component (K, R, C) whether its fitted translator is applied (T) or the component is copied
(D). Keys are un-rotated before their map and rotated for the receiver after it. The artefact is a folder:
`config.json`, `model.safetensors`, `README.md`. A bridge is refused for states of any other model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from huggingface_hub import ModelCard, ModelHubMixin
from safetensors.torch import load_file, save_file

from statebridge.bridge.card import render_card
from statebridge.bridge.config import PLANS, Plan
from statebridge.errors import ConfigError, StateFileError, StateMismatch
from statebridge.state import COMPONENTS, HybridState, LayerState, ModelIdentity, rotate, unrotate
from statebridge.state.file import atomic_file
from statebridge.state.layer import FIELDS
from statebridge.translate import BlockAffine, HeadAffine, HeadBilinear, Translator

FORMAT = "statebridge.bridge"
FORMAT_VERSION = 1
#: Which map translates which field of a layer.
MAPS: dict[str, type[Translator]] = {
    "key": HeadAffine,
    "value": HeadAffine,
    "recurrent_state": HeadBilinear,
    "conv_state": BlockAffine,
}


@dataclass(frozen=True)
class BridgeConfig:
    """Everything of a bridge but its tensors.

    Attributes
    ----------
    source, receiver
        Identities of the two models.
    plan
        Per component K, R, C: "T" translate or "D" copy.
    tokenizer
        Digest of the tokenizer that both models share.
    fit
        How the translators were fitted: settings, documents, errors on validation documents.
    """

    source: ModelIdentity
    receiver: ModelIdentity
    plan: Plan = "DDD"
    tokenizer: str = ""
    fit: Mapping[str, Any] = field(default_factory=dict)


class Bridge(ModelHubMixin, library_name="statebridge"):
    """Translate states of one source model into states of one receiver.

    Parameters
    ----------
    config
        Identities, plan and provenance.
    translators
        (layer, field) -> fitted map; may hold more than the plan uses.

    Raises
    ------
    StateMismatch
        When the plan copies a component whose shapes differ, or translates one without a map.
    """

    def __init__(self, config: BridgeConfig, translators: Mapping[tuple[int, str], Translator]) -> None:
        self.config = config
        self.translators = dict(translators)
        self._placed: dict[tuple[int, str, torch.device], Translator] = {}
        self._check()

    @classmethod
    def direct(cls, source: ModelIdentity, receiver: ModelIdentity, tokenizer: str = "") -> Bridge:
        """The bridge that copies everything (plan DDD)."""
        return cls(BridgeConfig(source, receiver, "DDD", tokenizer), {})

    def with_plan(self, plan: str) -> Bridge:
        """The same translators under another plan."""
        if plan not in PLANS:
            raise ConfigError(f"{plan!r} is no plan; use one of {', '.join(PLANS)}.")
        return Bridge(dataclasses.replace(self.config, plan=cast(Plan, plan)), self.translators)

    @property
    def translated(self) -> frozenset[str]:
        """Components that the plan translates."""
        return frozenset(c for c, choice in zip(COMPONENTS, self.config.plan, strict=True) if choice == "T")

    def __call__(self, state: HybridState) -> HybridState:
        """Translate a source state into a receiver state; the source state stays as it is.

        Parameters
        ----------
        state
            A state of the source, of any batch size; partial states stay partial.

        Returns
        -------
        HybridState
            A state of the receiver in memory of its own, on the devices of `state`.

        Raises
        ------
        StateMismatch
            When the state is of another model or tokenizer, or its key positions are unknown.
        """
        book = state.bookkeeping
        self.config.source.require(
            book.model,
            "this bridge does not translate states of this model",
            "Use the bridge that was fitted for the model the state came from.",
        )
        if book.tokenizer and self.config.tokenizer and book.tokenizer != self.config.tokenizer:
            raise StateMismatch(
                "this state was read with another tokenizer",
                {"tokenizer": (self.config.tokenizer[:12], book.tokenizer[:12])},
                "Tokenize the prefix with the tokenizer of the pair.",
            )
        state.validate()
        turn = self._turns_keys()
        if turn and book.positions is None and "K" in state.components:
            raise StateMismatch(
                "keys cannot be un-rotated",
                {"positions": ("known", None)},
                "Capture with position_ids, or use a plan that copies K.",
            )
        with torch.no_grad():
            layers = tuple(self._layer(index, layer, state, turn) for index, layer in enumerate(state.layers))
        return HybridState(layers, dataclasses.replace(book, model=self.config.receiver)).validate()

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card that `save_pretrained` writes where there is none."""
        return ModelCard(render_card(self.config))

    def _turns_keys(self) -> bool:
        return "K" in self.translated or self.config.source.rope != self.config.receiver.rope

    def _layer(self, index: int, layer: LayerState, state: HybridState, turn: bool) -> LayerState:
        def move(field_name: str, tensor: torch.Tensor) -> torch.Tensor:
            rope, positions = self.config.source.rope, state.bookkeeping.positions
            turned = field_name == "key" and turn and rope is not None and positions is not None
            if turned:
                tensor = unrotate(tensor, positions, rope)  # type: ignore[arg-type]
            if FIELDS[field_name] in self.translated:
                tensor = self._map(index, field_name, tensor.device).apply(tensor)
            elif not turned:
                tensor = tensor.clone()
            if turned and self.config.receiver.rope is not None:
                tensor = rotate(tensor, positions, self.config.receiver.rope)  # type: ignore[arg-type]
            return tensor

        return layer.map(move)

    def _map(self, index: int, field_name: str, device: torch.device) -> Translator:
        key = (index, field_name, device)
        if key not in self._placed:
            self._placed[key] = self.translators[index, field_name].to(device)
        return self._placed[key]

    def _check(self) -> None:
        source, receiver = self.config.source.layers, self.config.receiver.layers
        differences: dict[str, tuple[Any, Any]] = {}
        if len(source) != len(receiver):
            differences["number of layers"] = (len(receiver), len(source))
        for index, (ours, theirs) in enumerate(zip(source, receiver, strict=False)):
            for name, component in FIELDS.items():
                mine, other = getattr(ours, name), getattr(theirs, name)
                if component in self.translated:
                    if mine and (index, name) not in self.translators:
                        differences[f"translator of layer {index} {name}"] = ("fitted", "missing")
                elif mine != other:
                    differences[f"layer {index} {name} shape"] = (other, mine)
        if differences:
            raise StateMismatch(
                f"the plan {self.config.plan} cannot be carried out",
                differences,
                "Copy only components of equal shape, and translate only what was fitted.",
            )

    def _save_pretrained(self, save_directory: Path) -> None:
        tensors = {
            f"layers.{index}.{name}.{part}": tensor.detach().cpu().contiguous()
            for (index, name), translator in self.translators.items()
            for part, tensor in translator.tensors().items()
        }
        with atomic_file(save_directory / "model.safetensors") as temporary:
            save_file(tensors, temporary, metadata={"format": FORMAT})
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "class": type(self).__name__,
            "maps": {name: kind.__name__ for name, kind in MAPS.items()},
            "digest": _digest(save_directory / "model.safetensors"),
            **dataclasses.asdict(self.config),
        }
        with atomic_file(save_directory / "config.json") as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        **_: Any,
    ) -> Bridge:
        folder = Path(model_id)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(
                snapshot_download(
                    model_id,
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    local_files_only=local_files_only,
                    token=token,
                    allow_patterns=["config.json", "model.safetensors"],
                )
            )
        return _load(folder)


def _load(folder: Path) -> Bridge:
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind, version = content["format"], int(content["format_version"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateFileError(f"{folder} is not a bridge folder ({error!r}).") from error
    if kind != FORMAT or version > FORMAT_VERSION:
        raise StateFileError(
            f"{path} holds {kind!r} version {version}, this library reads {FORMAT!r} up to {FORMAT_VERSION}; "
            "upgrade statebridge."
        )
    weights = folder / "model.safetensors"
    if not weights.is_file() or _digest(weights) != content.get("digest"):
        raise StateFileError(f"{weights} is missing or does not match its digest; fetch the bridge again.")
    try:
        config = BridgeConfig(
            source=ModelIdentity.from_dict(content["source"]),
            receiver=ModelIdentity.from_dict(content["receiver"]),
            plan=content["plan"],
            tokenizer=str(content["tokenizer"]),
            fit=dict(content["fit"]),
        )
        if config.plan not in PLANS:
            raise ValueError(f"plan {config.plan!r}")
        return Bridge(config, _translators(load_file(weights)))
    except (KeyError, TypeError, ValueError, AttributeError, safetensors.SafetensorError) as error:
        raise StateFileError(
            f"{folder} holds a malformed bridge ({error!r}); fetch or fit it again."
        ) from error


def _translators(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[int, str], Translator]:
    parts: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        head, index, field_name, part = name.split(".", 3)
        if head != "layers" or field_name not in MAPS:
            raise ValueError(f"unexpected tensor {name!r}")
        parts.setdefault((int(index), field_name), {})[part] = tensor
    return {key: MAPS[key[1]].from_tensors(found) for key, found in parts.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
