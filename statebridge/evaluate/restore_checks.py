"""Single checks of the restore control, beside the comparison with the native model.

Each takes a model, the cache and state it has after a prefix, the tokens that follow and the logits that are
right, and gives a verdict and what it measured. Two of them change weights in place and put them back.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from statebridge.capture import continue_from, restore
from statebridge.capture.kernels import runnable_kernels
from statebridge.capture.model import cache_keyword, cache_of, profile
from statebridge.capture.walker import layer_parts
from statebridge.errors import StateMismatch
from statebridge.state import HybridState


def native(model: Any, ids: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
    """The model with its own cache; positions are said because Bamba restarts them in every call."""
    past = 0 if cache is None else cache.get_seq_length()
    pieces = torch.split(
        ids, 1 if cache is not None and profile(model).rule.single_step else ids.shape[1], dim=1
    )
    device, logits = model.get_input_embeddings().weight.device, []
    for piece in pieces:
        positions = torch.arange(past, past + piece.shape[1], device=device)[None]
        options = {} if cache is None else {cache_keyword(model): cache}
        with torch.no_grad(), runnable_kernels(model):
            output = model(
                input_ids=piece.to(device),
                position_ids=positions,
                use_cache=True,
                logits_to_keep=0 if past else 1,
                **options,
            )
        cache, past = cache_of(output), past + piece.shape[1]
        logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


def continued(model: Any, state: HybridState, after: torch.Tensor) -> torch.Tensor:
    return continue_from(model, state, after).logits


def difference_of(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = (a.float() - b.float()).abs().max()
    return float(torch.nan_to_num(difference, nan=torch.inf))


def _file(model: Any, cache: Any, state: HybridState, after: Any, expected: Any) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        state.save(path)
        size, loaded = path.stat().st_size, HybridState.load(path)
    same = all(map(torch.equal, _tensors(loaded), _tensors(state.to("cpu"))))
    moved = difference_of(continued(model, loaded, after), expected)
    kept = "equal" if same else "changed"
    return same and moved == 0, f"{size:,} bytes, tensors {kept}, max difference {moved:g}"


def _forks(model: Any, cache: Any, state: HybridState, after: Any, expected: Any) -> tuple[bool, str]:
    before = [tensor.clone() for tensor in _tensors(state)]
    one, two = restore(state, model), restore(state, model)
    places = [_memory(_live(one)), _memory(_live(two)), _memory(_live(cache)), _memory(_tensors(state))]
    apart = len(set().union(*places)) == sum(map(len, places))
    native(model, after.flip(1), one)
    moved = difference_of(native(model, after, two)[0], expected)
    kept = all(map(torch.equal, _tensors(state), before))
    detail = (
        f"memory {'apart' if apart else 'shared'}, state {'kept' if kept else 'moved'}, fork moved {moved:g}"
    )
    return apart and kept and moved == 0, detail


def _dtypes(model: Any, cache: Any, state: HybridState, after: Any, expected: Any) -> tuple[bool, str]:
    back = restore(state, model)
    wrong = [
        f"layer {index} {name}: {given.dtype} for {tensor.dtype}"
        for index, (layer, held) in enumerate(zip(state.layers, back.layers, strict=True))
        for name, tensor in layer.tensors()
        if (given := layer_parts(held).get(name, tensor.new_empty(0, dtype=torch.bool))).dtype != tensor.dtype
    ]
    return not wrong, "; ".join(wrong) or "as captured"


def _other_weights(model: Any, cache: Any, state: HybridState, after: Any, expected: Any) -> tuple[bool, str]:
    matrix = max(model.get_decoder().layers.parameters(), key=lambda p: p.numel())
    with _changed(matrix, lambda t: t.neg()):
        return _refused(model, state, "weights")


def _other_rotation(
    model: Any, cache: Any, state: HybridState, after: Any, expected: Any
) -> tuple[bool, str]:
    rotary = [m.inv_freq for m in model.get_decoder().modules() if hasattr(m, "inv_freq")]
    if state.bookkeeping.model.rope is None:
        return True, "the model has no rotary embedding"
    with contextlib.ExitStack() as stack:
        for frequencies in rotary:
            stack.enter_context(_changed(frequencies, lambda t: t * 0.9))
        return _refused(model, state, "rope")


def _partial(model: Any, cache: Any, state: HybridState, after: Any, expected: Any) -> tuple[bool, str]:
    accepted = [c for c in sorted(state.components) if not _refused(model, state.without(c), "partial")[0]]
    if accepted:
        return False, f"accepted without {', '.join(accepted)}"
    return True, f"refused without {', '.join(sorted(state.components))}"


CHECKS: dict[str, Callable[..., tuple[bool, str]]] = {
    "file": _file,
    "forks": _forks,
    "dtypes": _dtypes,
    "other weights": _other_weights,
    "other rotation": _other_rotation,
    "partial": _partial,
}


def _refused(model: Any, state: HybridState, reason: str) -> tuple[bool, str]:
    try:
        restore(state, model)
    except StateMismatch as error:
        return reason in str(error), f"refused: {error.what}"
    return False, "accepted"


@contextlib.contextmanager
def _changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """`tensor` with other values inside the block, in place as an optimizer changes weights."""
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.copy_(change(before))
        try:
            yield
        finally:
            tensor.copy_(before)


def _tensors(state: HybridState) -> list[torch.Tensor]:
    return [tensor for layer in state.layers for _, tensor in layer.tensors()]


def _live(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in layer_parts(layer).values()]


def _memory(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
