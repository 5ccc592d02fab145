"""What the numbers of a run say in words: arms, gates, and the verdict a reader sees first.

Every sentence is made from `result.json` alone, and every number in it is one that stands there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statebridge.evaluate.palette import label

_ARMS = {
    "native": "the receiver reads the prefix itself: what a hand-over can reach at best",
    "restore": "the receiver's own state, captured and restored; must equal native exactly",
    "source": "the source continues its own prefix: no hand-over at all",
    "empty": "the receiver without any prefix",
    "kv only": "the hand-over's keys and values alone, without recurrent and convolution memory",
    "gdn only": "the hand-over's recurrent and convolution memory alone, without keys and values",
    "wrong donor": "the hand-over of another document's state; must be much worse",
    "calibrated": "the plan, then the bridge's calibrator",
}
_PARTS = ("keys and values", "recurrent matrices", "convolution history")
GATES = {
    "full state": "the whole state matters, it is the right document's, and the hand-over beats the source",
    "near native": "the hand-over can hardly be told from a receiver that read the prefix itself",
}
_METRICS = {
    "nll": "NLL, nats per token",
    "excess": "NLL above native, nats per token",
    "ncr": "share of the prefix's worth recovered (NCR)",
    "tqr": "share of the receiver's advantage over the source kept (TQR)",
    "top1": "same most likely token as native",
    "kl": "KL divergence from native, nats",
    "js": "JS divergence from native, nats",
}


def meaning(arm: str) -> str:
    """One line on what an arm is."""
    kind, _, number = arm.rpartition(" ")
    if number.isdigit():
        words = {
            "window": "the receiver reads only the last {} of the prefix, no state",
            "handover +": "hand-over of all but the last {}, read by the receiver itself",
        }
        return words[kind].format("token" if number == "1" else f"{int(number):,} tokens")
    if arm.startswith("wrong donor "):
        return f"the plan {number} with another document's state, uncalibrated"
    if arm in _ARMS:
        return _ARMS[arm]
    if ":" in arm:
        return "translates (T) or copies (D) as written, layers before each colon"
    done = {"T": [], "D": []}  # type: dict[str, list[str]]
    for choice, part in zip(arm, _PARTS, strict=True):
        done[choice].append(part)
    return "; ".join(
        f"{verb} {_listed(done[choice])}"
        for choice, verb in (("T", "translates"), ("D", "copies"))
        if done[choice]
    )


def metric(name: str, handover: str) -> str:
    """A gate's metric as readers see it."""
    if name.startswith("handover − "):
        return f"NLL: hand-over minus {label(name.removeprefix('handover − '), handover)}"
    return _METRICS[name]


def number(value: float | None, digits: int = 3, sign: bool = False) -> str:
    """A number with a real minus sign; "undefined" for None."""
    if value is None:
        return "undefined"
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def interval(found: Mapping[str, Any], digits: int = 3, sign: bool = False) -> str:
    """`0.111 [0.093, 0.130]`."""
    if found["estimate"] is None:
        return "undefined"
    # an end is None where resamples left the ratio undefined, which bounds nothing
    low = "−∞" if found["low"] is None else number(found["low"], digits, sign)
    high = "∞" if found["high"] is None else number(found["high"], digits, sign)
    return f"{number(found['estimate'], digits, sign)} [{low}, {high}]"


def side(difference: Mapping[str, Any]) -> str:
    """ "better", "worse" or "no clear difference" for hand-over − other, smaller being better."""
    low, high = difference["low"], difference["high"]
    if low is None or high is None or low <= 0 <= high:
        return "no clear difference"
    return "better" if high < 0 else "worse"


def conclusion(result: Mapping[str, Any]) -> str:
    """The verdict in one sentence, from the two published gates where they are among the run's."""
    full, near = (result["gates"].get(name, {}).get("verdict") for name in ("full state", "near native"))
    if full is None or near is None:
        return "What this run's own gates say:"
    rows = result["gates"]["full state"]["inequalities"]
    others = [row["metric"].removeprefix("handover − ") for row in rows if row["verdict"] == full]
    named = _listed([label(other, result["handover"]) for other in others])
    if full == "fail":
        return f"Do not rely on this bridge: the hand-over does not beat {named}."
    if full == "inconclusive":
        return f"These documents do not settle whether the hand-over beats {named}."
    return (
        "The hand-over carries the prefix's memory"
        + {
            "pass": " and can stand in for reading it.",
            "fail": ", but reading the prefix is measurably better.",
            "inconclusive": "; whether it is as good as reading is not settled.",
        }[near]
    )


def headline(result: Mapping[str, Any]) -> str:
    """The gates in one line."""
    verdicts = {name: gate["verdict"] for name, gate in result["gates"].items()}
    if not verdicts:
        return "This run has no gates; the numbers below stand for themselves."
    said = []
    for kind, one, many in (
        ("pass", "passes", "pass"),
        ("fail", "fails", "fail"),
        ("inconclusive", "is inconclusive", "are inconclusive"),
    ):
        names = [name for name, found in verdicts.items() if found == kind]
        if names:
            said.append(f"{_listed(names)} {one if len(names) == 1 else many}")
    return f"Gates: {'; '.join(said)}."


def summary(result: Mapping[str, Any], prefix: int) -> list[str]:
    """The verdict in sentences: what the hand-over reaches, against whom it wins and against whom not."""
    hand = result["handover"]
    own, arms = result["arms"][hand], result["arms"]
    first = (
        f"{result['documents']} documents, prefix of {prefix:,} tokens. With the hand-over ({hand}) the receiver "
        f"scores {number(own['nll']['estimate'])} nats per token on the true next tokens; reading the prefix itself "
        f"it scores {number(arms['native']['nll']['estimate'])}. The distance is {interval(own['excess'])}"
    )
    if own.get("ncr", {}).get("estimate") is not None:
        first += f", so that {_share(own['ncr'])} of what the prefix is worth comes across"
    lines = [first + "."]
    for arm, better, worse in (
        ("source", "It beats letting the source go on", "It does not beat letting the source go on"),
        (
            "wrong donor",
            "It needs the right document's state",
            "It is no better than another document's state",
        ),
    ):
        found = result["differences"].get(f"handover − {arm}")
        if found:
            said = better if side(found) == "better" else worse
            unclear = " (no clear difference)" if side(found) == "no clear difference" else ""
            lines.append(f"{said}{unclear}: hand-over minus {arm} {interval(found, sign=True)}.")
    return lines + equal_cost(result)


def equal_cost(result: Mapping[str, Any]) -> list[str]:
    """Where the bridge beats the plain truncated read at equal cost, and where it does not."""
    rows = result["equal_cost"]
    lines = []
    if rows:
        said = {"better": "beats", "worse": "loses to", "no clear difference": "cannot be told from"}
        for kind, verb in said.items():
            chosen = [row for row in rows if side(row["difference"]) == kind]
            if chosen:
                cases = _listed(
                    [f"{_count(row['tokens'])} ({interval(row['difference'], sign=True)})" for row in chosen]
                )
                lines.append(
                    f"At equal cost it {verb} the plain truncated read where the receiver itself reads this many "
                    f"of the prefix's last tokens: {cases}."
                )
    alone = {
        int(name.rpartition(" ")[2]): found
        for name, found in result["differences"].items()
        if name.startswith("handover − window ")
    }
    if alone:
        sides = {w: side(alone[w]) for w in sorted(alone)}
        parts = [
            f"{verb} a plain read of the last {_listed([f'{w:,}' for w, s in sides.items() if s == kind])}"
            for kind, verb in (
                ("better", "beats"),
                ("no clear difference", "cannot be told from"),
                ("worse", "loses to"),
            )
            if kind in sides.values()
        ]
        lines.append(f"With none of the prefix read, the hand-over alone {', and '.join(parts)} tokens.")
    return lines


def _count(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "none"


def _share(found: Mapping[str, Any]) -> str:
    percent = {key: None if found[key] is None else 100 * found[key] for key in ("estimate", "low", "high")}
    return interval(percent, 0).replace(" [", " % [", 1)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
