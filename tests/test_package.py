"""The package itself: quick to import, and its names are what they say."""

from __future__ import annotations

import subprocess
import sys

import pytest

import statebridge

CODE = """
import sys
import statebridge
assert "torch" not in sys.modules
from statebridge.capture.model import profile  # puts the room where the function of its name belongs
assert callable(statebridge.capture) and statebridge.capture.__name__ == "capture"
"""


def test_importing_the_package_loads_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)


def test_every_name_is_there() -> None:
    for name in statebridge.__all__:
        assert getattr(statebridge, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = statebridge.nonsense
