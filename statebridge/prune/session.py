"""A video session whose history is pruned as it grows.

Each chunk is generated or observed, written by the clean pass, scored, and left alone until it leaves the
window; then the mask that its scores make is applied, once. Scores of chunks that are still in the window
are therefore state, and so is the last frame, which the next chunk's temporal difference needs. All randomness
is drawn from generators that depend on the seed and the chunk's number alone, so that every policy meets the
same noise and a restored session needs no random state.

Knows backbones and policies by their protocols, no model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from statebridge.errors import PruneError, StateMismatch, StoreError
from statebridge.prune.backbone import Backbone, Clock, Raggedness
from statebridge.prune.discrepancy import require_probe
from statebridge.prune.history import Visible, prune_chunk, pruning_ratio, visible_positions
from statebridge.prune.policy import ChunkRecord, Policy
from statebridge.prune.rotary import Reindex, require_known
from statebridge.sessions import Buffer, BufferKind
from statebridge.sessions.adapters import buffer_tensor, tensor_buffer
from statebridge.worlds.cache import History, HistoryCache, Slots
from statebridge.worlds.sampler import Trajectory

_SAMPLE, _PROBE, _SCORE = range(3)  # what a generator is for


class PrunedSession:
    """A session of one backbone under one policy.

    Parameters
    ----------
    backbone
        The adapted model.
    policy
        What is kept of chunks that leave the window.
    batch
        Rows.
    reindex
        Where old keys are read; None at their own times.
    probe_step
        Index into the backbone's schedule at which discrepancies are read.
    seed
        Seed of all noise.
    noise_device
        Device of the generators; the CPU's noise is the same for every device of the model.

    Attributes
    ----------
    cache
        The history.
    pending
        Scores float32 [B, N] of chunks in the window, by chunk number.
    seen
        What each chunk saw, for PR.

    Raises
    ------
    PruneError
        When the probe step is outside the schedule, the rotation of keys is unknown, or the policy splits heads and
        the backbone's attention cannot.
    """

    def __init__(
        self,
        backbone: Backbone,
        policy: Policy,
        *,
        batch: int = 1,
        reindex: Reindex | None = None,
        probe_step: int = 2,
        seed: int = 0,
        noise_device: torch.device | str = "cpu",
    ) -> None:
        require_known(backbone.rotation)
        if policy.probes:
            require_probe(probe_step, backbone.schedule)
        self.backbone, self.policy, self.reindex = backbone, policy, reindex
        self.probe_step, self.seed, self.noise_device = probe_step, seed, noise_device
        self.cache = backbone.empty_cache(batch)
        first = policy.first_heads(backbone.geometry.layers, backbone.geometry.heads)
        if first is not None:
            if backbone.raggedness is Raggedness.NONE:
                raise PruneError(
                    f"{policy.name} keeps other tokens in other heads, which the attention of "
                    f"{type(backbone).__name__} cannot read; choose a policy with one mask."
                )
            self.cache = self.cache.split(first)
        self.pending: dict[int, Tensor] = {}
        self.seen: list[Visible] = []
        self._last_frame: Tensor | None = None
        self._full = 0  # positions that a full cache would show

    @property
    def clock(self) -> Clock:
        """Number and first frame of the next chunk."""
        return Clock(self.cache.next_chunk, self.cache.next_time)

    @torch.no_grad()
    def generate(self, condition: Any) -> Trajectory:
        """Sample the next chunk and remember it; the score is read off the trajectory, without a further call."""
        history = self._read()
        trajectory = self.backbone.sample(history, self.clock, condition, self._generator(_SAMPLE))
        probe = trajectory.predictions[self.probe_step] if self.policy.probes else None
        self._remember(history, trajectory.final, condition, probe)
        return trajectory

    @torch.no_grad()
    def observe(self, clean: Tensor, condition: Any) -> None:
        """Remember a chunk that was observed, scored by one prediction from its noised self at its own time."""
        history = self._read()
        probe = None
        if self.policy.probes and self.clock.chunk >= self.policy.sink:
            probe = self.backbone.probe(
                history, self.clock, clean, self.probe_step, condition, self._generator(_PROBE)
            )
        self._remember(history, clean, condition, probe)

    def pruning_ratio(self, first_chunk: int = 0) -> float:
        """Return PR over the chunks from `first_chunk` on."""
        return pruning_ratio(self.seen, first_chunk)

    def _read(self) -> History:
        where = None if self.reindex is None else self.reindex.coordinates(self.cache)
        return self.backbone.read(self.cache, where)

    def _generator(self, purpose: int) -> torch.Generator:
        # a generator for each chunk and purpose: what one policy draws cannot shift what another sees
        seed = (self.seed * 1_000_003 + self.clock.chunk) * 3 + purpose
        return torch.Generator(self.noise_device).manual_seed(seed % 2**63)

    def _remember(self, history: History, clean: Tensor, condition: Any, probe: Tensor | None) -> None:
        number, geometry = self.clock.chunk, self.backbone.geometry
        tokens = self.backbone.tokens(clean)
        pending = dict(self.pending)
        if number >= self.policy.sink:
            record = ChunkRecord(
                number,
                tokens,
                None if probe is None else self.backbone.tokens(probe),
                self._last_frame,
                geometry.frame_tokens,
                self._generator(_SCORE),
            )
            pending[number] = _finite(self.policy.score(record), number)
        cache = self.cache.append(self.backbone.write(history, self.clock, clean, condition))
        leaving = number - self.policy.window
        if leaving in pending:
            cache = prune_chunk(cache, leaving, self.policy.keep(pending.pop(leaving)))
        # nothing fails from here on: a chunk is remembered whole or not at all
        self.seen.append(Visible(number, visible_positions(self.cache), self._full))
        self.cache, self.pending = cache, pending
        self._full += tokens.shape[0] * tokens.shape[1] * geometry.layers * geometry.heads
        self._last_frame = tokens[:, -geometry.frame_tokens :]

    def buffers(self) -> Iterator[Buffer]:
        """Every buffer that a continuation needs, between two chunks."""
        yield Buffer.json("settings", BufferKind.SETTINGS, self._settings())
        clock = {"chunk": self.cache.next_chunk, "time": self.cache.next_time, "full": self._full}
        yield Buffer.json("clock", BufferKind.CLOCK, clock)
        yield Buffer.json("seen", BufferKind.CLOCK, [dataclasses.astuple(entry) for entry in self.seen])
        for g, slots in enumerate(self.cache.groups):
            yield Buffer.json(f"groups.{g}.heads", BufferKind.SETTINGS, [slots.heads, slots.padded])
            for name in ("coordinates", "chunks", "frames"):
                yield tensor_buffer(f"groups.{g}.{name}", BufferKind.CLOCK, getattr(slots, name))
            for layer, (key, value) in enumerate(zip(slots.keys, slots.values, strict=True)):
                yield tensor_buffer(f"groups.{g}.layers.{layer}.key", BufferKind.KV, key)
                yield tensor_buffer(f"groups.{g}.layers.{layer}.value", BufferKind.KV, value)
        for number, scores in self.pending.items():
            yield tensor_buffer(f"pending.{number}", BufferKind.WINDOW, scores)
        if self._last_frame is not None:
            yield tensor_buffer("last_frame", BufferKind.LATENT, self._last_frame)

    def load(self, buffers: Iterable[Buffer]) -> None:
        """Become the session that gave these buffers.

        Raises
        ------
        StateMismatch
            When that session had another policy, seed, probe step or re-indexing.
        StoreError
            When a buffer is missing or does not hold what its name says.
        """
        named = {buffer.name: buffer for buffer in buffers}
        device = self.backbone.device
        try:
            saved, mine = named["settings"].value(), self._settings()
            differing = {key: (mine[key], saved.get(key)) for key in mine if mine[key] != saved.get(key)}
            if differing:
                raise StateMismatch(
                    "the pruned session was saved under other settings",
                    differing,
                    "Make the session with those.",
                )
            clock = named["clock"].value()
            groups = tuple(_slots(named, g, device) for g in range(len(self.cache.groups)))
            pending = {
                int(name[8:]): buffer_tensor(buffer).to(device)
                for name, buffer in named.items()
                if name.startswith("pending.")
            }
            seen = [Visible(*entry) for entry in named["seen"].value()]
            chunk = clock["chunk"]
            last = buffer_tensor(named["last_frame"]).to(device) if chunk else None
            in_window = range(max(self.policy.sink, chunk - self.policy.window), chunk)
            if sorted(pending) != list(in_window):
                raise ValueError(f"scores of chunks {sorted(pending)} instead of {list(in_window)}")
            cache = HistoryCache(groups, chunk, clock["time"])
            full = clock["full"]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StoreError(
                f"These buffers do not make a pruned session ({error!r}); restore them whole."
            ) from error
        self.cache, self.pending, self.seen, self._last_frame, self._full = cache, pending, seen, last, full

    def _settings(self) -> dict[str, Any]:
        return {
            "policy": [self.policy.name, repr(self.policy)],
            "reindex": repr(self.reindex),
            "probe_step": self.probe_step,
            "seed": self.seed,
        }


def _finite(scores: Tensor, chunk: int) -> Tensor:
    """Refuse scores that compare with nothing: a threshold would drop all their tokens without a word."""
    broken = (~scores.isfinite().all(1)).tolist()
    if any(broken):
        raise PruneError(
            f"The scores of chunk {chunk} are no numbers in row {broken.index(True)}, so the model's weights or the "
            "observed frames are not finite either; mend those."
        )
    return scores


def _slots(named: dict[str, Buffer], group: int, device: torch.device) -> Slots:
    heads, padded = named[f"groups.{group}.heads"].value()

    def tensor(name: str) -> Tensor:
        return buffer_tensor(named[f"groups.{group}.{name}"]).to(device)

    return Slots(
        tuple(tuple(layer) for layer in heads),
        tuple(tensor(f"layers.{layer}.key") for layer in range(len(heads))),
        tuple(tensor(f"layers.{layer}.value") for layer in range(len(heads))),
        tensor("coordinates"),
        tensor("chunks"),
        tensor("frames"),
        padded,
    )
