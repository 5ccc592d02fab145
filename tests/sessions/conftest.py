"""Put this folder's helpers, and those of the rooms below, on the path."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in ("", "../state", "../capture"):
    sys.path.insert(0, str((Path(__file__).parent / folder).resolve()))


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """An empty folder in memory where the system has such, for tests that sync thousands of times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)
