"""AnyFlow's attention over a history that may have been pruned.

The model's own read path pads queries, keys and values with zeros to a multiple of 128 queries and gives no mask,
so zero keys take part in its softmax; its cache pass masks them. Both are done here in the same kernel, so that
an unpruned history gives the model's own bits. Histories with padding or head groups go through plain attention.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_anyflow_far import AnyFlowCausalAttnProcessor, apply_rotary_emb
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.nn.attention.flex_attention import create_block_mask

from statebridge.prune.attention import attend_groups, chosen_mass
from statebridge.worlds.cache import History

_PADDED_TO = 128  # block size of the model's own attention


@dataclass
class LayerPass:
    """What one layer's attention reads in one pass, and what it leaves behind.

    Attributes
    ----------
    layer
        Its index.
    history
        Rotated keys and values of the past.
    padded
        Whether zero keys are added as in the model's own read path.
    chosen
        Slots whose attention mass is measured, bool [B, S]; None in any other pass.
    key, value
        The chunk's own, [B, H, N, D], keys raw; set by the pass.
    mass
        Attention on the chosen slots [H]; set by a measuring pass.
    """

    layer: int
    history: History
    padded: bool
    chosen: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    mass: Tensor | None = None


class PrunedAttention(AnyFlowCausalAttnProcessor):  # type: ignore[misc]
    """The model's attention over a history that may have been pruned; without one it is the model's own."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Any = None,
        rotary_emb: dict[str, Tensor] | None = None,
        kv_cache: Any = None,
        kv_cache_flag: dict[str, Any] | None = None,
    ) -> Tensor:
        """Attend from a chunk to the history and to itself."""
        if not isinstance(kv_cache, LayerPass):
            own: Tensor = super().__call__(
                attn,
                hidden_states,
                encoder_hidden_states,
                attention_mask,
                rotary_emb,
                kv_cache,
                kv_cache_flag,
            )
            return own
        assert rotary_emb is not None
        query, key, value = (
            projected.to(hidden_states.dtype).unflatten(2, (attn.heads, -1)).transpose(1, 2)  # [B, H, N, D]
            for projected in (
                attn.norm_q(attn.to_q(hidden_states)),
                attn.norm_k(attn.to_k(hidden_states)),
                attn.to_v(hidden_states),
            )
        )
        kv_cache.key, kv_cache.value = key, value
        query, rotated = (apply_rotary_emb(x, rotary_emb["query"]) for x in (query, key))
        if kv_cache.chosen is not None:
            kv_cache.mass = chosen_mass(kv_cache.layer, query, rotated, kv_cache.history, kv_cache.chosen)
        past, count = kv_cache.history, query.shape[2]
        padding = (0, 0, 0, -count % _PADDED_TO)
        if len(past) == 1 and past[0].valid is None:
            key, value = (
                torch.cat([old[kv_cache.layer], new], 2)
                for old, new in ((past[0].keys, rotated), (past[0].values, value))
            )
            mask = None
            if not kv_cache.padded:
                padding_keys = (0, 0, 0, -key.shape[2] % _PADDED_TO)
                mask = _real_keys(count + padding[3], key.shape[2], padding_keys[3], key.device)
            else:
                padding_keys = padding
            mixed = self._dense(
                F.pad(query, padding), F.pad(key, padding_keys), F.pad(value, padding_keys), mask
            )
            mixed = mixed[:, :, :count]
        else:
            zeros = padding if kv_cache.padded else (0, 0, 0, 0)
            mixed = attend_groups(kv_cache.layer, query, F.pad(rotated, zeros), F.pad(value, zeros), past)
        out: Tensor = attn.to_out[0](mixed.transpose(1, 2).flatten(2, 3).type_as(query))
        return out

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """Run the kernel that the model's own read path runs, for the same bits: [B, H, N, D]."""
        dim = query.shape[3]
        narrow = max(0, 16 - dim)  # the kernel takes heads from 16 channels
        q, k, v = (F.pad(x, (0, narrow)).transpose(1, 2) for x in (query, key, value))
        scale = dim**-0.5 if narrow else None
        out: Tensor = dispatch_attention_fn(
            q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=scale, backend="flex"
        )
        return out[..., :dim].transpose(1, 2)


@functools.lru_cache(maxsize=4)  # one pass asks once a layer
def _real_keys(queries: int, keys: int, padding: int, device: torch.device) -> Any:
    """The block mask that lets every query see all keys but the padding."""
    return create_block_mask(
        lambda b, h, q, k: k < keys, None, None, queries, keys + padding, device=str(device)
    )
