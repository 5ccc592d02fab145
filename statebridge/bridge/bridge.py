"""The Bridge: what takes a state of the source to a state of the receiver.

    receiver_state = bridge(source_state)

A plan says per component (K, R, C) whether its fitted translator is applied (T) or the component is copied
(D). Keys are un-rotated before their map and rotated for the receiver after it; a copy turns them too where
the models rotate differently. A calibrator, where there is one, moves what the plan gave. Knows states, maps
and identities, no models and no layout on disk (artefact.py).
A bridge is refused for states of any other model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import ModelCard, ModelHubMixin

from statebridge.bridge.apply import Moves
from statebridge.bridge.artefact import BridgeConfig, fetch, malformed, read_folder, write_folder
from statebridge.bridge.card import render_card
from statebridge.calibrate import Calibrator
from statebridge.errors import ConfigError, StateMismatch
from statebridge.select import Plan
from statebridge.state import HybridState, ModelIdentity, Rotation
from statebridge.state.layer import FIELDS
from statebridge.translate import Translator


class Bridge(ModelHubMixin, library_name="statebridge"):
    """Translate states of one source model into states of one receiver.

    Parameters
    ----------
    config
        Identities, plan and provenance.
    translators
        (layer, field) -> fitted map; may hold more than the plan uses.
    calibrator
        Residuals on top of the plan, trained for it.

    Raises
    ------
    StateMismatch
        When the plan copies a component whose shapes differ, or translates one without a map, or the
        calibrator is for another geometry.
    ConfigError
        When the plan is none, or lists another number of layers.
    """

    def __init__(
        self,
        config: BridgeConfig,
        translators: Mapping[tuple[int, str], Translator],
        calibrator: Calibrator | None = None,
    ) -> None:
        self.config = config
        self.plan = Plan.parse(config.plan).require_layers(len(config.source.layers))
        self.translators = dict(translators)
        self.calibrator = calibrator and calibrator.require(config.receiver.layers)
        self._moves = Moves(self.plan, self.translators, self.calibrator)
        self._check()

    @classmethod
    def direct(cls, source: ModelIdentity, receiver: ModelIdentity, tokenizer: str = "") -> Bridge:
        """The bridge that copies everything (plan DDD)."""
        return cls(BridgeConfig(source, receiver, "DDD", tokenizer), {})

    def with_plan(self, plan: str | Plan) -> Bridge:
        """The same translators under a plan, without the calibrator, which belongs to the plan it was trained on."""
        config = dataclasses.replace(self.config, plan=str(Plan.parse(plan)), calibration={})
        return Bridge(config, self.translators)

    def with_calibrator(self, calibrator: Calibrator, report: Mapping[str, Any] | None = None) -> Bridge:
        """The same translators and plan with residuals on top; `report` says how these were trained."""
        config = dataclasses.replace(self.config, calibration=dict(report or {}))
        return Bridge(config, self.translators, calibrator)

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
        source, receiver = self.config.source.rope, self.config.receiver.rope
        # keys of models that rotate alike are copied as they are, which is exact
        turned = [
            i
            for i, layer in enumerate(state.layers)
            if layer.key is not None and (source != receiver or self.plan.translates(i, "K"))
        ]
        if turned and book.positions is None:
            raise StateMismatch(
                "keys cannot be un-rotated",
                {"positions": ("known", None)},
                "Capture with position_ids, or use a plan that copies K.",
            )

        @functools.cache
        def turn(device: torch.device) -> tuple[Rotation | None, Rotation | None]:
            positions = cast(torch.Tensor, book.positions)
            after = None if receiver is None else Rotation.of(positions, receiver, device)
            if source is None:
                return None, after
            before = after if source == receiver else Rotation.of(positions, source, device)
            return before and before.inverse, after

        with torch.inference_mode(False), torch.no_grad():
            moved_layers = self._moves(state.layers, dict.fromkeys(turned, turn))
            moved_book = book.copied(self.config.receiver)
        return HybridState(moved_layers, moved_book).validate()

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card that `save_pretrained` writes."""
        return ModelCard(render_card(self.config))

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        config: Any = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        model_card_kwargs: dict[str, Any] | None = None,
        **push_to_hub_kwargs: Any,
    ) -> str | None:
        """Save the bridge in a folder, replacing an older one there.

        Parameters
        ----------
        save_directory
            The folder; made when it is not there. Its card stays if it belongs to this very bridge.
        push_to_hub, repo_id, **push_to_hub_kwargs
            Whether to push the bridge as well, and where to; as in `push_to_hub`.
        config, model_card_kwargs
            Of the mixin's signature; a bridge knows its own.

        Returns
        -------
        str or None
            Address of the commit when pushed.

        Raises
        ------
        StateFileError
            When the folder cannot be written; an older bridge in it is whole, or refused by name on loading.
        """
        # not the mixin's, which removes the old config before the new one is there
        folder = Path(save_directory)
        write_folder(folder, self.config, self.translators, self.calibrator, str(self.generate_model_card()))
        if push_to_hub:
            return self.push_to_hub(repo_id or folder.name, **push_to_hub_kwargs)
        return None

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
    ) -> Bridge:
        """Load a bridge from a folder or from the hub and check its digest.

        Parameters
        ----------
        pretrained_model_name_or_path
            A folder that `save_pretrained` wrote, or a name on the hub.
        force_download, token, cache_dir, local_files_only, revision
            As everywhere in huggingface_hub.

        Raises
        ------
        StateFileError
            When there is no bridge, or it is damaged, edited, half saved or newer than this library.
        """
        folder = fetch(
            pretrained_model_name_or_path,
            force_download=force_download,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            revision=revision,
        )
        config, translators, calibrator = read_folder(folder)
        try:
            return cls(config, translators, calibrator)
        except (ConfigError, StateMismatch, RuntimeError) as error:
            raise malformed(folder, error) from error

    def _check(self) -> None:
        source, receiver = self.config.source.layers, self.config.receiver.layers
        differences: dict[str, tuple[Any, Any]] = {}
        if len(source) != len(receiver):
            differences["number of layers"] = (len(receiver), len(source))
        for index, (ours, theirs) in enumerate(zip(source, receiver, strict=False)):
            for name, component in FIELDS.items():
                mine, other = getattr(ours, name), getattr(theirs, name)
                translator = self.translators.get((index, name))
                if self.plan.translates(index, component):
                    if bool(mine) != bool(other):
                        differences[f"layer {index} {name} shape"] = (other, mine)
                    elif mine and translator is None:
                        differences[f"translator of layer {index} {name}"] = ("fitted", "missing")
                elif mine != other:
                    differences[f"layer {index} {name} shape"] = (other, mine)
                if translator is not None and (found := _outcome(translator, name, mine)) != other:
                    differences[f"result of the translator of layer {index} {name}"] = (other, found)
        if differences:
            raise StateMismatch(
                f"the plan {self.config.plan} cannot be carried out",
                differences,
                "Copy only components of equal shape, and translate only what was fitted.",
            )


def _outcome(translator: Translator, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | str:
    """What a translator makes of the source's shape, tried on zeros, which any NaN or infinity in it spoils."""
    if not shape:
        return "a map for nothing"
    # a layout among the tensors stays on the host
    device = next(tensor.device for tensor in translator.tensors().values() if tensor.is_floating_point())
    token = (1,) if FIELDS[name] == "K" else ()  # keys and values have a token axis after the heads
    try:
        with torch.no_grad():
            moved = translator.apply(torch.zeros(1, shape[0], *token, *shape[1:], device=device))
    except StateMismatch as error:
        return str(error)
    if not bool(torch.isfinite(moved).all()):
        return "NaN or infinity"
    return tuple(moved.shape[1:2] + moved.shape[3:]) if token else tuple(moved.shape[1:])
