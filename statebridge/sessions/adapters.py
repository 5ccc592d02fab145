"""A chat on a hybrid language model as a session: its state, the tokens not read yet, random states, clocks.

Every tensor of the state is a buffer; keys, values, token ids, masks and positions grow, so that checkpoints
share their prefix. A continuation also depends on what the process keeps outside any session: the default
random generators, which sampling draws from, and the number of threads, which decides the order of sums. They
are saved and put back as well, random states last, so that nothing done while loading can draw from them.

Knows states and torch, no models: `statebridge.capture` continues the state that is loaded here.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from statebridge.errors import StateMismatch, StoreError
from statebridge.sessions.session import Buffer, BufferKind, BufferSpec
from statebridge.state import HybridState
from statebridge.state.file import assemble, named_tensors, state_header

_KINDS = {
    "key": BufferKind.KV,
    "value": BufferKind.KV,
    "recurrent_state": BufferKind.RECURRENT,
    "conv_state": BufferKind.WINDOW,
    "token_ids": BufferKind.TOKENS,
    "pad_mask": BufferKind.TOKENS,
    "positions": BufferKind.CLOCK,
    "next_position": BufferKind.CLOCK,
}
#: Field -> the axis that grows, from the end.
_GROWS = {"key": -2, "value": -2, "token_ids": -1, "pad_mask": -1, "positions": -1}
_HEADER, _PENDING, _THREADS = "bookkeeping.header", "pending", "ambient.threads"
_PYTHON, _NUMPY, _TORCH, _CUDA = "ambient.python", "ambient.numpy", "ambient.torch", "ambient.cuda"


@dataclass
class HybridSession:
    """A session of a hybrid language model.

    Attributes
    ----------
    state
        The state; None in a session that is about to be loaded.
    pending
        Tokens int64 [B, N] that were chosen and not read yet, such as the last one of a generation; None without.
    generators
        The session's own random generators by name.
    clocks
        Counters by name, for what is neither a length nor a position: turns, steps, seconds.
    ambient
        Save and load the process's default random generators (torch on CPU and CUDA, numpy, python) and torch's
        number of threads. False for a session that never samples, or shares its process with others that do.
    """

    state: HybridState | None = None
    pending: torch.Tensor | None = None
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    clocks: dict[str, int | float] = field(default_factory=dict)
    ambient: bool = True

    def buffers(self) -> Iterator[Buffer]:
        """Every buffer that a continuation needs.

        Raises
        ------
        StoreError
            When there is no state yet.
        """
        if self.state is None:
            raise StoreError("The session has no state yet; let the model read something first.")
        self.state.validate()
        header = state_header(self.state)
        yield Buffer.json(_HEADER, BufferKind.SETTINGS, header)
        again = ("bookkeeping.token_ids", "bookkeeping.pad_mask", _HEADER)
        for name, tensor in named_tensors(self.state):
            last = name.rpartition(".")[2]
            grows = tensor.ndim + _GROWS[last] if last in _GROWS else None
            # K, R and C come from reading all tokens again, by the same schedule
            derivable = {"derivable_from": again, "cost": float(sum(header["seen_tokens"]))}
            yield tensor_buffer(
                name, _KINDS[last], tensor, grows=grows, **(derivable if "layers." in name else {})
            )
        if self.pending is not None:
            yield tensor_buffer(_PENDING, BufferKind.TOKENS, self.pending)
        for name, clock in self.clocks.items():
            yield Buffer.of(f"clock.{name}", BufferKind.CLOCK, clock)
        for name, generator in self.generators.items():
            yield tensor_buffer(f"generator.{name}", BufferKind.RANDOM, generator.get_state())
        if self.ambient:
            yield from _ambient()

    def load(self, buffers: Iterable[Buffer]) -> None:
        """Become the session that gave these buffers; all of it or, when an error is raised, nothing of it.

        Raises
        ------
        StateMismatch
            When generators or devices differ from those of the saved session.
        StoreError
            When a buffer is missing, unknown, or does not hold what its name says.
        """
        named = {buffer.name: buffer for buffer in buffers}
        try:
            tensors = {
                name: buffer_tensor(buffer)
                for name, buffer in named.items()
                if name.startswith(("layers.", "bookkeeping.")) and name != _HEADER
            }
            state = assemble(named[_HEADER].value(), tensors).validate()
            pending = buffer_tensor(named[_PENDING]) if _PENDING in named else None
            clocks = {name[6:]: b.array().item() for name, b in named.items() if name.startswith("clock.")}
            generators = {name[10:]: b for name, b in named.items() if name.startswith("generator.")}
            ambient = {name: buffer for name, buffer in named.items() if name.startswith("ambient.")}
            unknown = set(named) - set(tensors) - {_HEADER, _PENDING} - set(ambient)
            unknown -= {f"clock.{name}" for name in clocks} | {f"generator.{name}" for name in generators}
            if unknown:
                raise StoreError(
                    f"The buffer {min(unknown)} is not one of a hybrid session; load it elsewhere."
                )
            self._require_generators(generators)
            restores = _ambient_restores(ambient) if self.ambient else []
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StoreError(
                f"These buffers do not make a hybrid session ({error!r}); restore them whole."
            ) from error
        self.state, self.pending, self.clocks = state, pending, clocks
        for name, buffer in generators.items():
            self.generators[name].set_state(buffer_tensor(buffer))
        for restore in restores:
            restore()

    def _require_generators(self, saved: Mapping[str, Buffer]) -> None:
        if set(saved) != set(self.generators):
            raise StateMismatch(
                "this session was saved with other random generators",
                {"generators": (sorted(saved), sorted(self.generators))},
                "Give the session a generator of each of these names before loading.",
            )
        for name, buffer in saved.items():
            torch.Generator(self.generators[name].device).set_state(buffer_tensor(buffer))


def tensor_buffer(name: str, kind: BufferKind, tensor: torch.Tensor, **spec: Any) -> Buffer:
    """A buffer over a tensor; on the CPU it shares the tensor's memory."""
    whole = tensor.detach().cpu().contiguous()
    dtype = str(whole.dtype).removeprefix("torch.")
    data = whole.reshape(-1).view(torch.uint8).numpy()
    return Buffer(BufferSpec(name, kind, dtype, tuple(whole.shape), **spec), data)


def buffer_tensor(buffer: Buffer) -> torch.Tensor:
    """A tensor with memory of its own, so that sessions loaded from the same buffers share none."""
    dtype = getattr(torch, buffer.spec.dtype)
    if not buffer.data.size:  # torch cannot view nothing as another dtype
        return torch.empty(buffer.spec.shape, dtype=dtype)
    return torch.from_numpy(buffer.data.copy()).view(dtype).reshape(buffer.spec.shape)


def _ambient() -> Iterator[Buffer]:
    yield Buffer.json(_THREADS, BufferKind.SETTINGS, torch.get_num_threads())
    yield Buffer.json(_PYTHON, BufferKind.RANDOM, random.getstate())
    state: Any = np.random.get_state(legacy=False)
    state["state"]["key"] = state["state"]["key"].tolist()
    yield Buffer.json(_NUMPY, BufferKind.RANDOM, state)
    yield tensor_buffer(_TORCH, BufferKind.RANDOM, torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index, device_state in enumerate(torch.cuda.get_rng_state_all()):
            yield tensor_buffer(f"{_CUDA}.{index}", BufferKind.RANDOM, device_state)


def _ambient_restores(saved: Mapping[str, Buffer]) -> list[Callable[[], Any]]:
    """What puts ambient state back, random states last; each was tried on an object of its own."""
    if not saved:
        return []
    devices = sorted(name for name in saved if name.startswith(_CUDA))
    here = [f"{_CUDA}.{index}" for index in range(torch.cuda.device_count())]
    if not set(devices) <= set(here):
        raise StateMismatch(
            "this session was saved with random states of devices that are not here",
            {"devices": (devices, here)},
            "Use HybridSession(ambient=False) to go on without random states.",
        )
    threads = saved[_THREADS].value()
    if type(threads) is not int or not 1 <= threads <= 4096:
        raise ValueError(f"{threads!r} threads")
    version, words, gauss = saved[_PYTHON].value()
    python = (version, tuple(words), gauss)
    random.Random().setstate(python)
    numpy_state = saved[_NUMPY].value()
    numpy_state["state"]["key"] = np.asarray(numpy_state["state"]["key"], np.uint32)
    np.random.RandomState().set_state(numpy_state)
    default = buffer_tensor(saved[_TORCH])
    torch.Generator().set_state(default)
    restores: list[Callable[[], Any]] = [lambda: torch.set_num_threads(threads)]
    for name in devices:
        device, state = torch.device("cuda", here.index(name)), buffer_tensor(saved[name])
        torch.Generator(device).set_state(state)
        restores.append(functools.partial(torch.cuda.set_rng_state, state, device))
    restores.append(lambda: random.setstate(python))
    restores.append(lambda: np.random.set_state(numpy_state))
    restores.append(lambda: torch.set_rng_state(default))
    return restores
