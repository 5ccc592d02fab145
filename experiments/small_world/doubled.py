"""Teacher forcing in one pass: each chunk appears twice, clean and noisy, and a table says who sees whom.

    [clean 0 | clean 1 | ... | noisy 0 | noisy 1 | ...]
    clean i sees clean 0..i;   noisy i sees itself and clean 0..i-1

Thinned contexts are a smaller table: whole chunks, or single tokens of chunks that are old enough, are hidden
from everything later, as pruning, retrieval and windows do. `allowed[b, g, k]` says whether token k may be seen
by the tokens of chunk g of the doubled sequence. On a GPU the table is read inside flex_attention, which skips
the blocks that no table allows; `dense_attention` is its twin for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from statebridge.worlds import Conditioning, WorldModel, rotate
from statebridge.worlds.draws import uniform

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def structure(chunks: int, tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """The table without thinning, bool [2 N, 2 N tokens]."""
    number = torch.arange(chunks, device=device)
    clean = number[:, None] >= number[None, :]
    before = number[:, None] > number[None, :]
    own = number[:, None] == number[None, :]
    top = torch.cat([clean, torch.zeros_like(own)], dim=1)
    bottom = torch.cat([before, own], dim=1)
    return torch.cat([top, bottom]).repeat_interleave(tokens, dim=1)


def thinned(seeds: Tensor, chunks: int, tokens: int) -> Tensor:
    """The tables of a batch, bool [B, 2 N, 2 N tokens], one way of thinning a sequence.

    Of each ten sequences three to four see everything, and about two each see a window (often with the first
    chunk), a random part of the chunks, and a random part of the tokens, beyond a recent stretch of one to four
    chunks.
    """
    device = seeds.device
    u = uniform(seeds, 400, 5)  # [B, 5]
    way = u[:, 0, None, None]
    recent = 1 + (u[:, 1] * 4).floor()[:, None, None]
    share = u[:, 2, None, None]
    number = torch.arange(chunks, device=device)
    age = number[:, None] - number[None, :]  # [N, N], from the chunk that looks to the one that is seen
    old = (age > recent).repeat_interleave(tokens, dim=2)  # [B, N, N tokens]
    sink = (number == 0) & (u[:, 3] < 0.5)[:, None]  # [B, N]
    window = ~sink.repeat_interleave(tokens, dim=1)[:, None]
    by_chunk = uniform(seeds, 401, chunks)[:, None] < 0.95 * share
    by_token = uniform(seeds, 402, chunks * tokens)[:, None] < 0.15 + 0.8 * share
    hidden = torch.where(way < 0.65, by_token, False)
    hidden = torch.where(way < 0.45, by_chunk.repeat_interleave(tokens, dim=2), hidden)
    hidden = torch.where(way < 0.2, window, hidden) & old
    seen = F.pad(~hidden, (0, chunks * tokens), value=True)  # noisy tokens are never hidden
    return structure(chunks, tokens, device) & seen.repeat(1, 2, 1)


class Attention:
    """Attention over a doubled sequence whose positions and table change from step to step.

    The buffers keep their memory, so that what was compiled once serves every step.

    Attributes
    ----------
    allowed
        The table, bool [B, 2 N, 2 N tokens].
    cos, sin
        Rotary angles of the doubled sequence, float32 [B, 2 N tokens, D / 2].
    """

    def __init__(
        self, batch: int, chunks: int, tokens: int, pairs: int, device: torch.device, block: int
    ) -> None:
        length = 2 * chunks * tokens
        self.tokens = tokens
        self.allowed = torch.ones(batch, 2 * chunks, length, dtype=torch.bool, device=device)
        self.cos = torch.zeros(batch, length, pairs, device=device)
        self.sin = torch.zeros(batch, length, pairs, device=device)
        self.mask = self._blocks(structure(chunks, tokens, device), block)

    def set(self, allowed: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Take the table and the angles [B, N tokens, D / 2] of the next step."""
        self.allowed.copy_(allowed)
        self.cos.copy_(torch.cat([cos, cos], dim=1))
        self.sin.copy_(torch.cat([sin, sin], dim=1))

    def flex(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Block-sparse attention [B, H, 2 N tokens, D]."""
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        out = flex_attention(q, k, v, block_mask=self.mask)
        assert isinstance(out, torch.Tensor)
        return out

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same by a full mask."""
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        mask = self.allowed.repeat_interleave(self.tokens, dim=1)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def _blocks(self, table: Tensor, block: int) -> BlockMask:
        """Blocks that some table may allow; all count as partial, so the table is asked in each."""
        allowed, tokens = self.allowed, self.tokens
        full = table.repeat_interleave(tokens, dim=0)
        n = len(full) // block
        some = full.view(n, block, n, block).any(dim=3).any(dim=1)
        counts = some.sum(1, dtype=torch.int32)
        order = (~some).to(torch.int8).argsort(dim=1, stable=True).to(torch.int32)

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return allowed[b, q // tokens, k]

        return BlockMask.from_kv_blocks(
            counts[None, None],
            order[None, None],
            BLOCK_SIZE=block,
            mask_mod=visible,
            seq_lengths=(len(full), len(full)),
        )


def predict(
    model: WorldModel, clean: Tensor, noisy: Tensor, sigma: Tensor, conditioning: Conditioning, attend: Attend
) -> Tensor:
    """Predict every chunk from its noisy copy.

    Parameters
    ----------
    clean, noisy
        Patches float32 [B, N, tokens, channels].
    sigma
        Noise levels of the noisy chunks, float32 [B, N].
    conditioning
        Of the N chunks in a row.
    attend
        `Attention.flex` or `Attention.dense`.

    Returns
    -------
    x0
        Clean patches, float32 [B, N, tokens, channels].
    """
    B, N, T, _ = clean.shape
    embedded = [model.embed(x.flatten(1, 2), conditioning).view(B, N, T, -1) for x in (clean, noisy)]
    x = torch.cat(embedded, dim=1)  # [B, 2 N, T, d]
    modulation, last = model.modulate(torch.cat([torch.zeros_like(sigma), sigma], dim=1))
    for block in model.blocks:
        x = block(x, modulation, attend)
    return model.decode(x[:, N:], last[:, N:])
