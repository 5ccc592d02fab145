"""A chat on a hybrid language model as a session of a runtime.

On the device it is a live transformers cache that goes on in place; off it, a state in host memory. Both hold the
same numbers, so a chat that was moved goes on bit-exactly under the same schedule of passes. Each chat samples from a
generator of its own: the process's generator takes its state while tokens are drawn, and gets its own back. Tokens
that were chosen and not read yet (the last one of a generation) belong to the chat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from statebridge.capture import (
    Continuation,
    Generation,
    continue_from,
    generate_from,
    identity_of,
    prefill,
    restore,
)
from statebridge.capture.walker import layer_parts
from statebridge.errors import CaptureError, StoreError
from statebridge.sessions.adapters import HybridSession
from statebridge.sessions.runtime_cache import (
    carried,
    drawing_from,
    held_bytes,
    require_kind,
    state_bytes,
    to_host,
    unread,
)
from statebridge.sessions.session import Buffer, BufferKind
from statebridge.state import HybridState
from statebridge.state.file import named_tensors

if TYPE_CHECKING:
    from statebridge.bridge import Bridge
    from statebridge.sessions.runtime_language import LanguageEngine


class LanguageSession:
    """A chat: on the device a live cache, off it a state; never both."""

    def __init__(
        self, engine: LanguageEngine, state: HybridState | None, pending: torch.Tensor | None, seed: int
    ) -> None:
        self.engine = engine
        self.model = engine.models[0] if state is None else engine.model_of(state.bookkeeping.model)
        self.sound = True
        self._live: Continuation | None = None
        generator = torch.Generator(self._device).manual_seed(seed)
        if pending is not None:
            pending = self._checked(None, pending, None if state is None else state.batch_size)
        # what it is off the device; its `state` is None while it is on it
        self._rest = HybridSession(state, pending, {"sampling": generator}, ambient=False)

    @property
    def seen_tokens(self) -> int:
        """Tokens that the longest row has read."""
        return 0 if self._book is None else int(self._book.seen_tokens.max())

    @property
    def pending(self) -> torch.Tensor | None:
        """Tokens that were chosen and not read yet, int64 [B, N]; None without."""
        return self._rest.pending

    def state(self) -> HybridState:
        """The state in host memory of its own.

        Raises
        ------
        CaptureError
            When nothing was read yet.
        """
        if self._live is not None:
            return to_host(self._live)
        if self._rest.state is None:
            raise CaptureError("The session has read nothing yet; let it step first.")
        return self._rest.state.clone()

    # what every session of a runtime can do

    def buffers(self) -> Iterable[Buffer]:
        """Every buffer that a continuation needs; a session that has read nothing has a generator all the same."""
        if self._book is None:
            random = self._rest.generators["sampling"].get_state().numpy()
            found = [Buffer.of("generator.sampling", BufferKind.RANDOM, random)]
            if self.pending is not None:
                found.append(Buffer.of("pending", BufferKind.TOKENS, self.pending.numpy()))
            return found
        at_rest = self._rest if self._live is None else dataclasses.replace(self._rest, state=self.state())
        return at_rest.buffers()

    def load(self, buffers: Iterable[Buffer]) -> None:
        """Become the session that gave these buffers, off the device.

        Raises
        ------
        StateMismatch
            When it is on none of the engine's models, or samples on another kind of device.
        StoreError
            When these buffers do not make a chat.
        """
        named = {buffer.name: buffer for buffer in buffers}
        if "generator.sampling" not in named:
            raise StoreError("These buffers do not make a chat (it has no generator); restore them whole.")
        require_kind(named["generator.sampling"].spec.nbytes, self._device)
        if set(named) <= {"generator.sampling", "pending"}:  # it has read nothing
            loaded = LanguageSession(self.engine, None, None, 0)._rest
            loaded.generators["sampling"].set_state(torch.tensor(named["generator.sampling"].array()))
            if "pending" in named:
                loaded.pending = torch.tensor(named["pending"].array())
            model = self.engine.models[0]
        else:
            generators = {"sampling": torch.Generator(self._device)}
            loaded = HybridSession(generators=generators, ambient=False)
            loaded.load(named.values())
            assert loaded.state is not None
            model = self.engine.model_of(loaded.state.bookkeeping.model)
        self.model = model
        # the session may be on a model elsewhere
        loaded.generators["sampling"] = carried(loaded.generators["sampling"], self._device)
        self._rest, self._live, self.sound = loaded, None, True

    def prepare(self) -> None:
        """Install the state in a live cache."""
        if self._rest.state is not None:
            cache = restore(self._rest.state, self.model)
            self._live = Continuation(torch.empty(0), cache, self._rest.state.bookkeeping, 0, 0)
            self._rest.state = None

    def release(self) -> None:
        """Take the state to the host."""
        if self._live is not None:
            self._rest.state = to_host(self._live)
            self._live = None

    def nbytes(self) -> int:
        """Bytes of the memory behind every tensor that it holds, shared memory once."""
        tensors = [self._rest.generators["sampling"].get_state()]
        tensors += [] if self.pending is None else [self.pending]
        if self._live is not None:
            tensors += [t for layer in self._live.cache.layers for t in layer_parts(layer).values()]
            book = self._live.bookkeeping
            tensors += [t for t in vars(book).values() if isinstance(t, torch.Tensor)]
        elif self._rest.state is not None:
            tensors += [tensor for _, tensor in named_tensors(self._rest.state)]
        return held_bytes(tensors)

    def after(self, given: torch.Tensor | None, *, max_new_tokens: int = 0, **options: Any) -> int:
        """Bytes after `given` [B, N] and `max_new_tokens` were read."""
        ids = self._unread(given)
        rows, new = ids.shape[0], ids.shape[1] + max(max_new_tokens - 1, 0)
        token, fixed = state_bytes(self.model)
        begun = 0 if self._book is not None else rows * fixed
        return self.nbytes() + begun + rows * (new * token + 8)  # the last new token is not read, but kept

    def step(self, given: torch.Tensor | None, *, last_logits_only: bool = True) -> torch.Tensor:
        """Read pending tokens and then `given`, in one pass.

        Parameters
        ----------
        given
            Token ids [B, N]; None to read what is pending alone.
        last_logits_only
            Give logits of the last token only, as the first step of a session always does.

        Returns
        -------
        torch.Tensor
            Logits [B, 1, vocab] after the last token, or [B, M, vocab] after each of the M tokens read.
        """
        ids = self._unread(given)
        if self._live is None:  # something failed between the host and the device
            self.prepare()
        self.sound = False
        if self._live is None:
            live = prefill(self.model, ids, tokenizer=self.engine.tokenizer)
        else:
            live = continue_from(self.model, self._live, ids, last_logits_only=last_logits_only)
        logits, live.logits = live.logits, torch.empty(0)  # a session does not hold its logits
        self._live, self._rest.pending, self.sound = live, None, True
        return logits

    # what chats can do besides

    def generate(
        self, given: torch.Tensor | None, *, max_new_tokens: int, seed: int | None = None, **options: Any
    ) -> Generation:
        """Read pending tokens and `given`, then generate; the last new token is pending afterwards.

        The session waits on the host meanwhile, so that one copy is on the device, and a generation that fails
        leaves it as it was.
        """
        ids = self._unread(given)
        if many := [name for name in ("num_return_sequences", "num_beams") if (options.get(name) or 1) != 1]:
            raise CaptureError(f"A session keeps its rows, so {many[0]} must be 1; fork it instead.")
        if self._book is None:
            if ids.shape[1] < 2:
                raise CaptureError("A new session needs two tokens to generate from; let it step first.")
            state = to_host(prefill(self.model, ids[:, :-1], tokenizer=self.engine.tokenizer))
            ids = ids[:, -1:]
        else:
            self.release()
            assert self._rest.state is not None
            state = self._rest.state
        before = self._rest.generators["sampling"].get_state()
        try:
            with drawing_from(self._rest.generators["sampling"], seed):
                made = generate_from(self.model, state, ids, max_new_tokens=max_new_tokens, **options)
            if made.bookkeeping is None:
                raise CaptureError(
                    "A row ended before the others and read padding; generate from rows one by one."
                )
        except BaseException:
            self._rest.generators["sampling"].set_state(before)
            self.prepare()
            raise
        self._live = Continuation(torch.empty(0), made.cache, made.bookkeeping, 0, 0)
        self._rest.state, self._rest.pending = None, made.new_ids[:, -1:].to("cpu", torch.int64, copy=True)
        return made

    def handed_to(self, receiver: Any, bridge: Bridge) -> LanguageSession:
        """This session on another model, off the device; the session itself stays as it is.

        Raises
        ------
        StateMismatch
            When the bridge does not lead from this session's model to `receiver`.
        """
        bridge.config.receiver.require(
            identity_of(receiver), "this bridge leads to another receiver", "Use the bridge to this model."
        )
        moved = bridge(self._live.state() if self._live is not None else self.state())
        if not any(model is receiver for model in self.engine.models):
            self.engine.models.append(receiver)
        there = LanguageSession(self.engine, moved.to("cpu"), self._rest.pending, 0)
        there._rest.clocks = dict(self._rest.clocks)
        there._rest.generators["sampling"] = carried(self._rest.generators["sampling"], there._device)
        return there

    @property
    def _device(self) -> torch.device:
        return torch.device(self.model.get_input_embeddings().weight.device)

    @property
    def _book(self) -> Any:
        if self._live is not None:
            return self._live.bookkeeping
        return None if self._rest.state is None else self._rest.state.bookkeeping

    def _unread(self, given: torch.Tensor | None) -> torch.Tensor:
        return self._checked(self.pending, given, None if self._book is None else self._book.batch_size)

    def _checked(self, pending: Any, given: Any, rows: int | None) -> torch.Tensor:
        return unread(pending, given, rows, self.model.get_input_embeddings().num_embeddings)
