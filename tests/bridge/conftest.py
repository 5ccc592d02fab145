"""One bridge of the tiny pair, fitted once."""

from __future__ import annotations

import pytest
import tiny_pair

from statebridge.bridge import Bridge, FitConfig, fit_bridge


@pytest.fixture(scope="session")
def fitted() -> Bridge:
    """All maps of the tiny pair, plan TTT."""
    return fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), FitConfig(**tiny_pair.SMALL, plan="TTT"))
