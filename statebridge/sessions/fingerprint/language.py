"""A language model with everything that it holds between tokens as buffers, trusted by nobody.

`HybridSession` checks what it loads, so that a session comes back whole or not at all. This runtime checks nothing:
whatever is missing or wrong goes into the cache as it is, which shows what each part is worth. Buffers are the
tensors of every cache layer, the flags that decide whether a layer looks at them, the next position, the mask over
all slots, the token ids, and a generator for sampling.

Knows torch and the layout of a cache (`statebridge.capture.walker`); made to be measured, not to be served from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from statebridge.capture.kernels import runnable_kernels
from statebridge.capture.model import cache_keyword
from statebridge.capture.walker import new_cache
from statebridge.errors import StoreError
from statebridge.sessions.adapters import buffer_tensor, tensor_buffer
from statebridge.sessions.fingerprint.derivation import Derivation
from statebridge.sessions.session import Buffer, BufferKind

ATTENTION = {"key": "keys", "value": "values"}
_RECURRENT = {"recurrent_state": "recurrent_states", "conv_state": "conv_states"}
_KINDS = {
    "key": BufferKind.KV,
    "value": BufferKind.KV,
    "recurrent_state": BufferKind.RECURRENT,
    "conv_state": BufferKind.WINDOW,
}
FLAGS = ("has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized")


class CacheRuntime:
    """A live transformers cache as a session.

    Parameters
    ----------
    model
        A causal language model of transformers.
    batch
        Rows B.

    Attributes
    ----------
    token_ids, pad_mask
        What was read, int64 and bool [B, T].
    position
        Next position of each row, int64 [B].
    generator
        What sampling draws from.
    """

    def __init__(self, model: Any, batch: int = 1) -> None:
        self.model = model
        self.cache = new_cache(model)
        self.token_ids = torch.zeros((batch, 0), dtype=torch.int64)
        self.pad_mask = torch.zeros((batch, 0), dtype=torch.bool)
        self.position = torch.zeros(batch, dtype=torch.int64)
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def read(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Read tokens in one pass.

        Parameters
        ----------
        ids
            int64 [B, N].
        mask
            bool [B, N], False at padding, which may only stand on the left of everything.

        Returns
        -------
        torch.Tensor
            Logits [B, N, vocabulary].
        """
        new = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        positions = self.position[:, None] + (new.long().cumsum(-1) - 1).clamp(min=0)
        self.token_ids = torch.cat((self.token_ids, ids), dim=1)
        self.pad_mask = torch.cat((self.pad_mask, new), dim=1)
        self.position = self.position + new.sum(-1)
        device = self.model.get_input_embeddings().weight.device
        with runnable_kernels(self.model):
            output = self.model(
                input_ids=ids.to(device),
                attention_mask=self._mask(ids.shape[1]),
                position_ids=positions.to(device),
                use_cache=True,
                **{cache_keyword(self.model): self.cache},
            )
        logits: torch.Tensor = output.logits
        return logits

    def sample(self, last: torch.Tensor, count: int) -> torch.Tensor:
        """Draw `count` tokens after reading `last` [B, 1]; int64 [B, count]."""
        drawn = []
        for _ in range(count):
            chances = self.read(last)[:, -1].float().softmax(-1).cpu()
            last = torch.multinomial(chances, 1, generator=self.generator)
            drawn.append(last)
        return torch.cat(drawn, dim=1)

    def buffers(self) -> Iterator[Buffer]:
        """Everything that is there, flags and clocks included."""
        for index, layer in enumerate(self.cache.layers):
            for field, tensor in _tensors(layer):
                grows = 2 if field in ATTENTION else None
                yield tensor_buffer(f"layers.{index}.{field}", _KINDS[field], tensor, grows=grows)
            for flag in FLAGS:
                if hasattr(layer, flag):
                    value = torch.tensor([bool(getattr(layer, flag)[0])])
                    yield tensor_buffer(f"layers.{index}.{flag}", BufferKind.SETTINGS, value)
        yield tensor_buffer("position", BufferKind.CLOCK, self.position)
        yield tensor_buffer("pad_mask", BufferKind.TOKENS, self.pad_mask, grows=1)
        yield tensor_buffer("token_ids", BufferKind.TOKENS, self.token_ids, grows=1)
        yield tensor_buffer("generator", BufferKind.RANDOM, self.generator.get_state())

    def load(self, buffers: Iterable[Buffer]) -> None:
        """Put whatever is given into a fresh cache; what is not given stays as a new cache has it.

        Raises
        ------
        StoreError
            When a buffer's name is none of this runtime's; its content is not looked at.
        """
        device = self.model.get_input_embeddings().weight.device
        self.cache = new_cache(self.model)
        for buffer in buffers:
            tensor = buffer_tensor(buffer)
            place = place_of(buffer.name)
            if place is None:
                self._put(buffer.name, tensor)
            elif place[0] < len(self.cache.layers) and place[1] in (*_KINDS, *FLAGS):
                _put_into(self.cache.layers[place[0]], place[1], tensor, device)
            else:
                raise StoreError(f"The buffer {buffer.name} is of no layer of this model; load it elsewhere.")

    def derivations(self) -> Iterator[Derivation]:
        """Everything comes from reading all tokens again in one pass, at the cost of reading them."""
        yield Derivation(("layers.*", "position"), ("token_ids", "pad_mask"), self._read_again)

    def _read_again(self, sources: Mapping[str, Buffer]) -> Iterator[Buffer]:
        ids, mask = (buffer_tensor(sources[name]) for name in ("token_ids", "pad_mask"))
        self.read(ids, mask)
        return self.buffers()

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        if name == "generator":
            self.generator.set_state(tensor)
        elif name in ("position", "pad_mask", "token_ids"):
            setattr(self, name, tensor)
        else:
            raise StoreError(f"The buffer {name} is not one of a language model; load it elsewhere.")

    def _mask(self, new: int) -> torch.Tensor | None:
        """The mask over the slots of the cache and `new` ones; a runtime that knows of no padding gives none."""
        if bool(self.pad_mask.all()):
            return None
        slots = int(self.cache.get_seq_length()) + new
        return self.pad_mask[:, -slots:].long().to(self.model.get_input_embeddings().weight.device)


def place_of(name: str) -> tuple[int, str] | None:
    """Layer and field of a buffer's name; None for what belongs to no layer."""
    match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
    return None if match is None else (int(match[1]), match[2])


def _put_into(layer: Any, field: str, tensor: torch.Tensor, device: torch.device) -> None:
    if field in FLAGS:
        getattr(layer, field)[0] = bool(tensor)
        return
    tensor = tensor.to(device)
    layer.dtype, layer.device = tensor.dtype, tensor.device
    if field in ATTENTION:
        setattr(layer, ATTENTION[field], tensor)
        layer.is_initialized = True
    else:
        getattr(layer, _RECURRENT[field])[0] = tensor
        if field == "conv_state":
            layer.conv_kernel_size[0] = tensor.shape[-1]


def _tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a cache layer that exist, whatever its flags say."""
    for field, name in ATTENTION.items():
        tensor = getattr(layer, name, None)
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            yield field, tensor
    for field, name in _RECURRENT.items():
        held = getattr(layer, name, None)
        tensor = held.get(0) if isinstance(held, dict) else held[0] if held else None
        if isinstance(tensor, torch.Tensor):
            yield field, tensor
