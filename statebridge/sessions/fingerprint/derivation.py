"""What a runtime says it can compute again: which buffers, from which others, and how.

Knows buffers and name patterns. A declaration is a claim: `Fingerprint.discover` tries it and believes what it
measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from statebridge.errors import FingerprintError
from statebridge.sessions.session import Buffer


@dataclass(frozen=True)
class Derivation:
    """A way to compute buffers from others.

    Attributes
    ----------
    targets, sources
        Names of buffers, or patterns of names (`layers.*.key`).
    derive
        Gives the targets from the sources by name. What it raises counts as a failure.
    """

    targets: tuple[str, ...]
    sources: tuple[str, ...]
    derive: Callable[[Mapping[str, Buffer]], Iterable[Buffer]]

    def gives(self, name: str) -> bool:
        """Whether `name` is a target."""
        return any(fnmatchcase(name, pattern) for pattern in self.targets)

    def reads(self, name: str) -> bool:
        """Whether `name` is a source."""
        return any(fnmatchcase(name, pattern) for pattern in self.sources)


@runtime_checkable
class Deriving(Protocol):
    """A runtime that declares derivations."""

    def derivations(self) -> Iterable[Derivation]:
        """Every declared way to compute buffers from others, working in a runtime that has read nothing."""


def derived(
    runtime: object, kept: Mapping[str, Buffer], missing: Iterable[str]
) -> tuple[dict[str, Buffer], dict[str, tuple[str, ...]]]:
    """Compute the missing buffers by the declarations of `runtime`, in an order that works.

    Parameters
    ----------
    runtime
        A fresh runtime; its state may change.
    kept
        Buffers that are there.
    missing
        Names to derive.

    Returns
    -------
    dict
        The missing buffers by name.
    dict
        Missing name -> names of the sources that were read for it.

    Raises
    ------
    FingerprintError
        When no declaration gives a missing buffer without needing a missing one.
    """
    here, wanted = dict(kept), set(missing)
    read: dict[str, tuple[str, ...]] = {}
    declared = tuple(runtime.derivations()) if isinstance(runtime, Deriving) else ()
    while wanted:
        for derivation in declared:
            targets = {name for name in wanted if derivation.gives(name)}
            if targets and not any(derivation.reads(name) for name in wanted):
                break
        else:
            raise FingerprintError(f"No declaration derives {min(wanted)} from the buffers that are there.")
        sources = {name: buffer for name, buffer in here.items() if derivation.reads(name)}
        given = {buffer.name: buffer for buffer in derivation.derive(sources)}
        if absent := targets - set(given):
            raise FingerprintError(f"The derivation of {min(absent)} did not give it.")
        here |= {name: given[name] for name in targets}
        read |= dict.fromkeys(targets, tuple(sorted(sources)))
        wanted -= targets
    return {name: here[name] for name in read}, read
