"""Run a model on the torch functions that stand behind its kernels.

Where fla or causal-conv1d is installed, transformers runs their kernels. In its model files every such kernel
stands in for a torch function that it keeps as `__wrapped__`. The torch functions give the same values, slower, and
they work where a kernel does not: under a backward pass that it refuses, on the meta device, which holds none, and on
the host of a machine with a GPU, where transformers chooses the kernels all the same.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch

#: Parts of the names of functions that transformers may replace by a kernel of fla or causal-conv1d.
_KERNELS = ("delta_rule", "causal_conv1d")


@contextlib.contextmanager
def reference_kernels(model: Any) -> Iterator[None]:
    """Put the torch functions in the place of kernels in the files that `model`'s classes come from."""
    files = {type(module).__module__: sys.modules[type(module).__module__] for module in model.modules()}
    replaced = [
        (file, name, function)
        for file in files.values()
        for name, function in vars(file).items()
        if any(part in name for part in _KERNELS) and hasattr(function, "__wrapped__")
    ]
    try:
        for file, name, function in replaced:
            setattr(file, name, inspect.unwrap(function))
        yield
    finally:
        for file, name, function in replaced:
            setattr(file, name, function)


def runnable_kernels(model: Any) -> contextlib.AbstractContextManager[None]:
    """Inside the `with` block `model` runs where it is: on the torch functions if it is on the host beside a GPU."""
    on_host = torch.cuda.is_available() and model.get_input_embeddings().weight.device.type == "cpu"
    return reference_kernels(model) if on_host else contextlib.nullcontext()
