"""Random states of an imaginary hybrid model, without any model."""

from __future__ import annotations

import torch

from statebridge.state import Bookkeeping, HybridState, LayerSpec, LayerState, ModelIdentity, RopeSpec

IDENTITY = ModelIdentity(
    model_type="imaginary",
    vocab_size=101,
    layers=(
        LayerSpec(recurrent_state=(4, 6, 5), conv_state=(14, 4)),
        LayerSpec(key=(2, 8), value=(2, 3)),
        LayerSpec(key=(2, 8), value=(2, 3), recurrent_state=(4, 6, 5), conv_state=(14, 4)),
        LayerSpec(),
    ),
    rope=RopeSpec((1.0, 0.1)),
    weights="0" * 64,
)


def random_state(lengths: list[int], seed: int = 0, identity: ModelIdentity = IDENTITY) -> HybridState:
    """A state whose rows have the given lengths, padded on the left with zeros."""
    generator = torch.Generator().manual_seed(seed)
    batch, longest = len(lengths), max(lengths)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    layers = []
    for spec in identity.layers:
        parts = {}
        for field in ("key", "value"):
            if shape := getattr(spec, field):
                tensor = torch.randn(batch, shape[0], longest, shape[1], generator=generator)
                parts[field] = (tensor * mask[:, None, :, None]).to(torch.bfloat16)
        for field, dtype in (("recurrent_state", torch.float32), ("conv_state", torch.bfloat16)):
            if shape := getattr(spec, field):
                parts[field] = torch.randn(batch, *shape, generator=generator).to(dtype)
        layers.append(LayerState(**parts))
    ids = torch.randint(1, identity.vocab_size, (batch, longest), generator=generator) * mask
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    book = Bookkeeping(ids, mask, positions, positions[:, -1] + 1, identity, schedule=(longest,))
    return HybridState(tuple(layers), book).validate()


def equal(a: HybridState, b: HybridState) -> bool:
    """Bit-equal tensors, dtypes and bookkeeping."""
    one, two = a.bookkeeping, b.bookkeeping
    pairs = [(x, y) for la, lb in zip(a.layers, b.layers, strict=True) for x, y in _pairs(la, lb)]
    pairs += [(one.token_ids, two.token_ids), (one.pad_mask, two.pad_mask)]
    pairs += [(one.positions, two.positions), (one.next_position, two.next_position)]
    same = all(
        x is y if x is None or y is None else x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs
    )
    names = ("model", "tokenizer", "schedule", "conv_layout", "recurrent_axes", "backend")
    return same and all(getattr(one, name) == getattr(two, name) for name in names)


def _pairs(a: LayerState, b: LayerState) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    return [(getattr(a, f), getattr(b, f)) for f in ("key", "value", "recurrent_state", "conv_state")]
