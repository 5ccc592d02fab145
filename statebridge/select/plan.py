"""The plan of a bridge: per layer and component, translate (T) or copy (D, for direct).

    "TDD"               K translated, R and C copied, in every layer
    "0-3:TDD,4-7:DDD"   eight layers in two groups
    "0:TDD,1-3:DDD"     a group of one layer

Letters stand in the order K, R, C. A plan does not know which layers a model has or what they hold; whoever
carries it out checks the coverage with `require_layers`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

from statebridge.errors import ConfigError
from statebridge.state import COMPONENTS, Component
from statebridge.stats import cells

_LETTERS = frozenset(cells(len(COMPONENTS)))
_GROUP = re.compile(r"(\d+)(?:-(\d+))?:(\w+)")


@dataclass(frozen=True)
class Plan:
    """Translate or copy, per layer and component.

    Parameters
    ----------
    choices
        One entry such as "TDD" for all layers, or one entry per layer.

    Raises
    ------
    ConfigError
        When an entry is none of the eight combinations of T and D.
    """

    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        wrong = [choice for choice in self.choices if choice not in _LETTERS]
        if wrong or not self.choices:
            raise ConfigError(
                f"{wrong[0] if wrong else ''!r} is no choice for {', '.join(COMPONENTS)}; use one of "
                f"{', '.join(sorted(_LETTERS))}."
            )

    @classmethod
    def parse(cls, text: str | Plan) -> Plan:
        """Read the written form; a plan is returned as it is.

        Raises
        ------
        ConfigError
            When the text is no plan, or its groups leave a layer out, overlap or are out of order.
        """
        if isinstance(text, Plan):
            return text
        if ":" not in text:
            return cls((text.strip(),))
        choices: list[str] = []
        for part in text.split(","):
            match = _GROUP.fullmatch(part.strip())
            if match is None:
                raise ConfigError(
                    f"{part!r} is no group of a plan; write first-last:TDD, for example 0-3:TDD."
                )
            first, last = int(match[1]), int(match[2] or match[1])
            if first != len(choices) or last < first:
                raise ConfigError(
                    f"The group {part.strip()!r} of the plan {text!r} should begin at layer {len(choices)} and "
                    "end there or later; list all layers once, in order."
                )
            choices += [match[3]] * (last - first + 1)
        return cls(tuple(choices))

    @property
    def uniform(self) -> bool:
        """Whether one choice holds for all layers, however many there are."""
        return len(self.choices) == 1

    def __str__(self) -> str:
        """The written form, which `parse` reads back."""
        if self.uniform:
            return self.choices[0]
        groups, first = [], 0
        for choice, members in groupby(self.choices):
            last = first + len(list(members)) - 1
            groups.append(f"{first}:{choice}" if first == last else f"{first}-{last}:{choice}")
            first = last + 1
        return ",".join(groups)

    def translates(self, layer: int, component: Component) -> bool:
        """Whether `component` of `layer` is translated."""
        choice = self.choices[0] if self.uniform else self.choices[layer]
        return choice[COMPONENTS.index(component)] == "T"

    def translated(self, holds: Sequence[Collection[Component]] | None = None) -> int:
        """Count the translated components.

        Parameters
        ----------
        holds
            Components that each layer has; a letter for one that a layer lacks does not count. Without it,
            every T of the written choices counts once.
        """
        if holds is None:
            return sum(choice.count("T") for choice in self.choices)
        self.require_layers(len(holds))
        return sum(self.translates(layer, c) for layer, held in enumerate(holds) for c in held)

    def require_layers(self, layers: int) -> Self:
        """Return the plan if it fits a model of `layers` layers.

        Raises
        ------
        ConfigError
            When it lists another number of layers.
        """
        if not self.uniform and len(self.choices) != layers:
            raise ConfigError(
                f"The plan {str(self)!r} lists {len(self.choices)} layers, the model has {layers}; list every "
                "layer once."
            )
        return self

    def per_layer(self, layers: int) -> Self:
        """The same plan with one entry per layer."""
        self.require_layers(layers)
        return type(self)(self.choices * layers) if self.uniform else self

    def flipped(self, layers: Iterable[int], component: Component) -> Self:
        """A plan with the other choice for `component` in the given layers of a per-layer plan."""
        where, swap = COMPONENTS.index(component), {"T": "D", "D": "T"}
        changed = list(self.choices)
        for layer in layers:
            choice = changed[layer]
            changed[layer] = choice[:where] + swap[choice[where]] + choice[where + 1 :]
        return type(self)(tuple(changed))


#: The eight plans that treat all layers alike, "DDD" first.
GLOBAL_PLANS: tuple[Plan, ...] = tuple(Plan((choice,)) for choice in cells(len(COMPONENTS)))
