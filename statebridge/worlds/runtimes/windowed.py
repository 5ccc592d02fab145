"""The windowed runtime: keys and values of the first chunk and the latest ones, written once and kept.

    state = window's keys and values + camera + clock + random state           (grows, then stays)

The window's frames are kept beside them, because while nothing has left the window the keys can be derived: the
same clean passes over the same frames give the same bits. Once a chunk has left, they cannot: the keys of the
chunks that stayed were written while the others were still in sight, and those frames are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from statebridge.errors import ConfigError, StoreError
from statebridge.sessions.adapters import buffer_tensor, tensor_buffer
from statebridge.sessions.fingerprint.derivation import Derivation
from statebridge.sessions.session import Buffer, BufferKind
from statebridge.worlds.cache import HistoryCache, Slots
from statebridge.worlds.conditioning import Conditioning
from statebridge.worlds.model import WorldModel
from statebridge.worlds.rollout import last_chunks, reread
from statebridge.worlds.runtimes.markov import chunk_bytes, chunks_of_nothing, conditioning_of, named_chunk
from statebridge.worlds.runtimes.memory import Held
from statebridge.worlds.runtimes.session import WorldSession
from statebridge.worlds.sampler import Sampler, write_chunk

Tensor = torch.Tensor

_SOURCES = ("window.chunks", "window.frames", "window.actions", "window.poses", "window.times")


class WindowedSession(WorldSession):
    """A world that is remembered for a while.

    Parameters
    ----------
    model, sampler, seed
        As in `WorldSession`.
    window
        Latest chunks that stay.
    sink
        First chunks that stay for good.

    Raises
    ------
    ConfigError
        When the window holds no chunk.
    """

    holds: ClassVar[Mapping[str, Held]] = {
        "layers.*": Held(BufferKind.KV),
        "window.chunks": Held(BufferKind.WINDOW),
        "window.frames": Held(BufferKind.LATENT),
        "window.actions": Held(BufferKind.WINDOW),
        "window.poses": Held(BufferKind.WINDOW),
        "window.times": Held(BufferKind.WINDOW),
    }

    def __init__(
        self,
        model: WorldModel,
        sampler: Sampler | None = None,
        seed: int = 0,
        *,
        window: int = 8,
        sink: int = 1,
    ) -> None:
        if window < 1 or sink < 0:
            raise ConfigError(
                f"A window of {window} chunks with {sink} first ones is none; keep at least 1 and 0."
            )
        self.window, self.sink = window, sink
        super().__init__(model, sampler, seed)

    @property
    def rolled(self) -> bool:
        """Whether a chunk has left the window, after which its keys cannot be derived."""
        return has_rolled(self.tensors["window.chunks"])

    def derivations(self) -> Iterator[Derivation]:
        """Keys and values come from the clean passes over the window's frames, while nothing has left it."""
        yield Derivation(("layers.*",), _SOURCES, self._derive)

    def _derive(self, sources: Mapping[str, Buffer]) -> Iterator[Buffer]:
        tensors = {name: buffer_tensor(sources[name]) for name in _SOURCES}
        for name, tensor in self._keys(tensors).items():
            yield tensor_buffer(name, BufferKind.KV, tensor)

    def _keys(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keys and values of the window, from its frames."""
        numbers, device = tensors["window.chunks"], self.model.device
        if has_rolled(numbers):
            raise StoreError(
                f"The keys of chunks {numbers.tolist()} cannot be derived, because others have left the window since "
                "they were written; restore the layers too."
            )
        before = conditioning_of(tensors, "window", device)
        cache = reread(self.model, tensors["window.frames"][None].to(device), before, numbers.tolist())
        return _layers(cache)

    def _nothing(self) -> dict[str, Tensor]:
        chunks = {"window.chunks": torch.empty(0, dtype=torch.int64)}
        empty = {name: tensor.cpu() for name, tensor in _layers(self.model.empty_cache()).items()}
        return chunks | chunks_of_nothing("window", self.model.config.camera.size) | empty

    def _history(self, conditioning: Conditioning) -> HistoryCache:
        c, device = self.model.config, self.model.device
        keys, values = (
            tuple(self.tensors[f"layers.{layer}.{part}"].to(device) for layer in range(c.layers))
            for part in ("key", "value")
        )
        numbers = self.tensors["window.chunks"].to(device)
        coordinates = conditioning_of(self.tensors, "window", device).coordinates(c.camera, c.grid)
        chunks = numbers.repeat_interleave(c.grid.chunk_tokens)
        frames = (numbers[:, None] * c.grid.frames + torch.arange(c.grid.frames, device=device)).flatten()
        frames = frames.repeat_interleave(c.grid.frame_tokens)
        heads = self.model.empty_cache().groups[0].heads
        slots = Slots(heads, keys, values, coordinates, chunks[None], frames[None])
        return HistoryCache((slots,), self.chunk, self.time)

    def _remember(
        self, frames: Tensor, conditioning: Conditioning, history: HistoryCache
    ) -> dict[str, Tensor]:
        cache = write_chunk(self.model, frames, conditioning, history)
        cache = last_chunks(self.window, self.sink)(cache)
        new = named_chunk("window", frames, conditioning)
        numbers = torch.cat([self.tensors["window.chunks"].cpu(), torch.tensor([self.chunk])])
        kept = (numbers < self.sink) | (numbers > self.chunk - self.window)
        by_frame = kept.repeat_interleave(self.model.config.grid.frames)
        tensors = {"window.chunks": numbers[kept]}
        for name, tensor in new.items():
            both = torch.cat([self.tensors[name].to(tensor.device), tensor])
            tensors[name] = both[by_frame.to(both.device)]
        return tensors | _layers(cache)

    def _growth(self) -> int:
        c, held = self.model.config, len(self.tensors["window.chunks"])
        if held == self.window + self.sink:
            return 0
        element = torch.empty(0, dtype=self.model.dtype).element_size()
        keys = 2 * c.layers * c.width * c.grid.chunk_tokens * element
        return chunk_bytes(c.grid.frames, c.camera.size) + keys + 8

    def _completed(self, tensors: dict[str, Tensor], given: set[str]) -> dict[str, Tensor]:
        layers = {name for name in tensors if name.startswith("layers.")}
        if not given & layers and len(tensors["window.chunks"]):
            return tensors | {name: tensor.cpu() for name, tensor in self._keys(tensors).items()}
        slots = len(tensors["window.chunks"]) * self.model.config.grid.chunk_tokens
        for name in layers:
            if tensors[name].shape[2] != slots:
                raise StoreError(
                    f"{name} has {tensors[name].shape[2]} slots for {slots} tokens in the window."
                )
        return tensors

    def _derivable(self, name: str) -> dict[str, Any]:
        if not name.startswith("layers.") or self.rolled:
            return {}
        cost = float(len(self.tensors["window.frames"]))
        return {"derivable_from": _SOURCES, "cost": cost}

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"window": self.window, "sink": self.sink}


def has_rolled(numbers: Tensor) -> bool:
    """Whether the chunks of a window are not simply the first ones of the session."""
    return numbers.tolist() != list(range(len(numbers)))


def _layers(cache: HistoryCache) -> dict[str, Tensor]:
    group = cache.groups[0]
    keys = {f"layers.{index}.key": key for index, key in enumerate(group.keys)}
    return keys | {f"layers.{index}.value": value for index, value in enumerate(group.values)}


def stored(buffers: Iterable[Buffer]) -> list[Buffer]:
    """The buffers that must be kept: those that nothing else gives."""
    return [buffer for buffer in buffers if not buffer.spec.derivable_from]
