"""Every error that statebridge raises on purpose.

A message is one sentence that names the thing that is wrong, and then the remedy. The command line
prints it without a traceback and leaves with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StatebridgeError(Exception):
    """Base of all errors a user can act on."""

    exit_code = 1


class StateMismatch(StatebridgeError):
    """A state, bridge or model does not fit where it was about to be used.

    Parameters
    ----------
    what
        What was attempted, for example "the state cannot be restored into this model".
    differences
        Name of each field that differs, with its two values as (expected, found).
    remedy
        What the user can do about it.
    """

    exit_code = 4

    def __init__(self, what: str, differences: Mapping[str, tuple[Any, Any]], remedy: str = "") -> None:
        self.what = what
        self.differences = dict(differences)
        self.remedy = remedy
        fields = "; ".join(
            f"{name}: expected {a!r}, found {b!r}" for name, (a, b) in self.differences.items()
        )
        super().__init__(f"{what} ({fields})." + (f" {remedy}" if remedy else ""))


class UnsupportedModel(StatebridgeError):
    """The model, its cache or a library version is one whose state cannot be moved exactly."""

    exit_code = 4


class CaptureError(StatebridgeError):
    """The cache cannot be captured as it stands, for example because right padding polluted it."""


class StateFileError(StatebridgeError):
    """A state file or bridge folder is truncated, corrupt, foreign or newer than this library."""


class StoreError(StatebridgeError):
    """A session store, a checkpoint in it or an archive of one is missing, damaged, foreign or cannot be written."""


class FingerprintError(StatebridgeError):
    """The state of a runtime cannot be measured: it does not repeat itself, or keeps state outside its buffers."""


class BudgetError(StatebridgeError):
    """A memory budget cannot hold what was asked for, and nothing more may be moved out of its way."""


class PruneError(StatebridgeError):
    """A history cannot be pruned as asked: a policy, a probe step, a mask or an adapter does not allow it."""


class FitError(StatebridgeError):
    """A translator cannot be fitted on what it was given."""


class ConfigError(StatebridgeError):
    """A config file or option is wrong; the message holds the path of the key."""

    exit_code = 2


class DocumentError(StatebridgeError):
    """Documents are missing, too short or unreadable."""
