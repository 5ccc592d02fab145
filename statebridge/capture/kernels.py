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
import threading
from collections.abc import Iterator
from typing import Any

import torch

#: Parts of the names of functions that transformers may replace by a kernel of fla or causal-conv1d.
_KERNELS = ("delta_rule", "causal_conv1d")


_lock = threading.Lock()
#: (file, name) -> the kernel that was there, and how many `with` blocks want it replaced.
_replaced: dict[tuple[str, str], tuple[Any, int]] = {}


@contextlib.contextmanager
def reference_kernels(model: Any) -> Iterator[None]:
    """Put the torch functions in the place of kernels in the files that `model`'s classes come from.

    For all models of these files in the process, and until the last of overlapping `with` blocks ends, whichever
    thread it is in.
    """
    files = {type(module).__module__ for module in model.modules()}
    with _lock:
        found = {
            (file, name): function
            for file in files
            for name, function in vars(sys.modules[file]).items()
            if any(part in name for part in _KERNELS) and hasattr(function, "__wrapped__")
        }
        found |= {place: kernel for place, (kernel, _) in _replaced.items() if place[0] in files}
        for (file, name), kernel in found.items():
            _replaced[file, name] = kernel, _replaced.get((file, name), (kernel, 0))[1] + 1
            setattr(sys.modules[file], name, inspect.unwrap(kernel))
    try:
        yield
    finally:
        with _lock:
            for file, name in found:
                kernel, wanted = _replaced.pop((file, name))
                if wanted > 1:
                    _replaced[file, name] = kernel, wanted - 1
                else:
                    setattr(sys.modules[file], name, kernel)


def runnable_kernels(model: Any) -> contextlib.AbstractContextManager[None]:
    """Inside the `with` block `model` runs where it is: on the torch functions if it is on the host beside a GPU."""
    on_host = torch.cuda.is_available() and model.get_input_embeddings().weight.device.type == "cpu"
    return reference_kernels(model) if on_host else contextlib.nullcontext()
