"""Load a model by folder or hub name, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from statebridge.errors import UnsupportedModel


def load_model(
    name: str, *, dtype: Any = "auto", device_map: Any = None, revision: str | None = None, **options: Any
) -> tuple[Any, Any | None]:
    """A causal language model in eval mode, and its tokenizer where it has one.

    Parameters
    ----------
    name
        Folder or hub name.
    dtype, device_map, revision, **options
        As in transformers' `from_pretrained`.

    Raises
    ------
    UnsupportedModel
        When there is no such model, it cannot be loaded, or its checkpoint lacks weights.
    """
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, device_map=device_map, revision=revision, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        hint = "" if Path(name).exists() else " and there is no such folder"
        raise UnsupportedModel(
            f"The model {name} cannot be loaded{hint}: {str(error).splitlines()[0]}"
        ) from error
    if missing := sorted(loading["missing_keys"]):
        # transformers fills them with random values and a warning
        raise UnsupportedModel(
            f"The checkpoint {name} lacks {len(missing)} weights, the first is {missing[0]}; fetch it again."
        )
    return model.eval(), load_tokenizer(name, revision)


def load_tokenizer(name: str, revision: str | None = None) -> Any | None:
    """The tokenizer of a folder or hub name; None where there is none."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError, TypeError):  # a folder with a model alone
        return None
    # transformers makes an empty tokenizer for a folder that has none
    return tokenizer if tokenizer("a")["input_ids"] else None
