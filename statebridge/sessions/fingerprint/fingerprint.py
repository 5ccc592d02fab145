"""The smallest state that is enough for a return, discovered by measurement.

    PCS = smallest S with D(restore(S)) ≤ eps; everything else is derivable

Nothing about an architecture is assumed: buffers are taken away and the return is looked at (`search` has the
steps). The result is a frozen value with its forms as JSON and as a table. Source: persistent computational state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from statebridge.errors import FingerprintError
from statebridge.sessions.fingerprint.bench import Bench, Mode, Runtime, Trial
from statebridge.sessions.fingerprint.distances import checked_eps
from statebridge.sessions.fingerprint.result import Finding, Role, shown, trial_json
from statebridge.sessions.fingerprint.search import Search
from statebridge.sessions.session import BufferSpec

#: Brings a fresh runtime to a state.
Anchor = Callable[[Runtime], object]


@dataclass(frozen=True)
class Fingerprint:
    """The smallest state found to be enough for a return.

    Attributes
    ----------
    eps
        Largest distance that counts as the same.
    noise
        Distance between two sessions that never left.
    restored
        Distances with every buffer restored.
    enough
        Distances with the needed buffers alone.
    greedy
        Whether buffers hid each other, so that they were dropped one after the other, largest first.
    findings
        Every group, most bytes at the last anchor first.
    """

    eps: float
    noise: Trial
    restored: Trial
    enough: Trial
    greedy: bool
    findings: tuple[Finding, ...]

    @classmethod
    def discover(
        cls,
        factory: Callable[[], Runtime],
        anchor: Anchor[Runtime] | Mapping[int, Anchor[Runtime]],
        probe: Callable[[Runtime], Any],
        distance: Callable[[Any, Any], float],
        eps: float = 0.0,
        *,
        other: Anchor[Runtime] | Mapping[int, Anchor[Runtime]] | None = None,
        group: Callable[[BufferSpec], str] = lambda spec: spec.name,
        derive: bool = True,
    ) -> Self:
        """Discover the state that a runtime needs to return to where it was.

        Parameters
        ----------
        factory
            Gives a runtime that has read nothing; anything with `buffers()` and `load()`. It must not lean on
            what earlier runtimes left in the process: seed what it draws from.
        anchor
            Brings a fresh runtime to the state to keep. Several by length show how buffers grow, and where a
            derivation stops holding: what is found is enough at all of them.
        probe
            Lets a runtime go on and gives the outcome: logits of the next tokens, frames of the next chunks.
        distance
            How far two outcomes are apart; not a number counts as infinite.
        eps
            Largest distance that counts as the same.
        other
            Brings a fresh runtime to another session's state, at the same lengths. Without it, that mode is left
            out.
        group
            Name of the group that a buffer is replaced with, from its spec; each alone when left out.
        derive
            Try the derivations that the runtime declares (see `Deriving`).

        Returns
        -------
        Fingerprint
            What is needed, what stands in for the rest, and every distance behind it.

        Raises
        ------
        FingerprintError
            When two sessions that never left differ by more than eps, when all buffers together do not bring
            the session back, or when there is no anchor, no eps, or no other session at one of the lengths.
        """
        anchors, others = _by_length(anchor), _by_length(other) if other is not None else {}
        if not anchors:
            raise FingerprintError("There is no anchor to return to; give at least one.")
        if other is not None and set(others) != set(anchors):
            raise FingerprintError(
                f"The other session is at the lengths {list(others)} and the anchors are at {list(anchors)}; give "
                "both at the same ones."
            )
        bench = Bench(factory, anchors, probe, distance, others, group)
        search = Search(bench, checked_eps(eps), derive)
        spared = search.spared
        enough = bench.trial(spared)
        return cls(eps, bench.noise, bench.trial({}), enough, search.greedy, search.findings())

    @property
    def anchors(self) -> tuple[int, ...]:
        """Lengths at which it was measured."""
        return tuple(sorted(self.noise.distances))

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the groups that must be kept."""
        return tuple(finding.name for finding in self.findings if finding.role is Role.NEEDED)

    def __getitem__(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.name == name)

    def nbytes(self, anchor: int, role: Role | None = None) -> int:
        """Bytes of all groups at an anchor, or of those with one role."""
        return sum(f.nbytes[anchor] for f in self.findings if role in (None, f.role))

    def to_json(self) -> dict[str, Any]:
        """Everything as one JSON object; an infinite distance is the string "inf"."""
        return {
            "eps": self.eps,
            "noise": trial_json(self.noise),
            "restored": trial_json(self.restored),
            "enough": trial_json(self.enough),
            "greedy": self.greedy,
            "needed": list(self.needed),
            "findings": [finding.to_json() for finding in self.findings],
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Cells of a table, its header first; distances are the largest over all anchors."""
        modes = [mode for mode in Mode if any(mode in finding.trials for finding in self.findings)]
        yield ("buffer", "bytes", "class", *modes, "role", "reason")
        for finding in self.findings:
            cells = [shown(finding.trials[m].worst) if m in finding.trials else "" for m in modes]
            size = f"{finding.largest:,}"
            yield (finding.name, size, str(finding.growth), *cells, str(finding.role), finding.reason)

    def markdown(self) -> str:
        """The table in Markdown."""
        header, *body = self.rows()
        lines = [header, tuple("---" for _ in header), *body]
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )


def _by_length(anchor: Anchor[Runtime] | Mapping[int, Anchor[Runtime]]) -> dict[int, Anchor[Runtime]]:
    return dict(sorted(anchor.items())) if isinstance(anchor, Mapping) else {0: anchor}
