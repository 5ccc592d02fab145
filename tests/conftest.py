"""Shared set-up: the folder of test helpers on the path, one thread a worker, quiet transformers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

import torch

# workers share the cores, and threads that wait for each other make tiny models many times slower
torch.set_num_threads(1)
