"""What the capture tests share: the model going on with its own cache, and tiny multimodal models."""

from __future__ import annotations

import functools
from typing import Any

import tiny
import torch
import transformers

from statebridge.capture.model import cache_keyword, cache_of, profile

#: One family per layout: K and R/C in different layers, in one layer, no R, no recurrent layer, one token a step.
LAYOUTS = ("qwen3_5", "falcon_h1", "lfm2", "llama", "jamba")


def run(model: Any, ids: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
    """The model itself, going on with its own cache.

    Positions are given: Bamba counts them from 0 in every call that does not say them.
    """
    past = cache.get_seq_length() if cache is not None else 0
    positions = torch.arange(past, past + ids.shape[1])[None].expand(ids.shape[0], -1)
    if cache is not None and profile(model).rule.single_step and ids.shape[1] > 1:
        # Jamba drops its recurrent state when it continues with several tokens at once
        logits = []
        for token in ids.split(1, dim=1):
            step, cache = run(model, token, cache)
            logits.append(step)
        return torch.cat(logits, dim=1), cache
    options = {cache_keyword(model): cache} if cache is not None else {}
    with torch.no_grad():
        output = model(input_ids=ids, position_ids=positions, use_cache=True, **options)
    return output.logits, cache_of(output)


def tensors_of(state: Any) -> list[torch.Tensor]:
    """All tensors of a state, bookkeeping included."""
    book = state.bookkeeping
    found = [tensor for layer in state.layers for _, tensor in layer.tensors()]
    return [*found, book.token_ids, book.pad_mask, book.next_position]


def snapshot(state: Any) -> list[torch.Tensor]:
    """Copies of all tensors of a state."""
    return [tensor.clone() for tensor in tensors_of(state)]


def unmoved(state: Any, before: list[torch.Tensor]) -> bool:
    """Whether a state is bit-equal to an earlier snapshot of it."""
    return all(torch.equal(a, b) for a, b in zip(tensors_of(state), before, strict=True))


IMAGE, VIDEO, VISION_START, VISION_END = 90, 91, 92, 93


@functools.cache
def multimodal() -> Any:
    """A tiny `Qwen3_5ForConditionalGeneration` whose text part has the weights of `tiny.build("qwen3_5")`."""
    text = tiny.build("qwen3_5")
    config = transformers.Qwen3_5Config(
        text_config=text.config.to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": text.config.hidden_size,
            "num_position_embeddings": 64,
            "initializer_range": 0.2,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(1)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


def image_prompt(seed: int = 0, grid: tuple[int, int] = (4, 6), text: int = 9) -> dict[str, torch.Tensor]:
    """Model inputs of one row: text, one image of `grid` patches (2 × 2 merged), text."""
    patches = grid[0] * grid[1]
    words = tiny.ids(1, 2 * text, seed=seed).clamp(max=80)
    picture = torch.tensor([[VISION_START, *[IMAGE] * (patches // 4), VISION_END]])
    ids = torch.cat((words[:, :text], picture, words[:, text:]), dim=1)
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(patches, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, *grid]]),
    }
