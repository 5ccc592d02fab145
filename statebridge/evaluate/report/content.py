"""The report's content, once, for both of its forms: sections of paragraphs, tables and pictures.

A section whose data a run does not hold does not exist. What the forms look like is told in html.py and md.py.
"""

from __future__ import annotations

from typing import Any

from statebridge.evaluate.palette import label
from statebridge.evaluate.report import further, plots, words
from statebridge.evaluate.report.blocks import Gate, Picture, Report, Section, Table
from statebridge.evaluate.report.data import Run
from statebridge.evaluate.report.words import interval, number

_TWO = frozenset({0, 1})  # a table whose first two columns hold words


def build(run: Run) -> Report:
    """The report of a run."""
    source, receiver = (run.result["provenance"][end]["name"] or end for end in ("source", "receiver"))
    made = (
        arms_section(run),
        _cost(run),
        _positions(run),
        _documents(run),
        effects_section(run),
        *further.sections(run),
        _identities(run),
        _terms(run),
    )
    return Report(
        title=f"Hand-over from {short(source)} to {short(receiver)}",
        conclusion=words.conclusion(run.result),
        headline=words.headline(run.result),
        summary=tuple(words.summary(run.result, run.config.prefix)),
        gates=tuple(gate_block(name, gate, run.handover) for name, gate in run.result["gates"].items()),
        sections=tuple(section for section in made if section is not None),
    )


def gate_block(name: str, gate: dict[str, Any], handover: str) -> Gate:
    """A gate of a result as readers see it."""
    rows = tuple(
        (
            f"{words.metric(row['metric'], handover)} {'≤' if row['relation'] == '<=' else '≥'} "
            f"{number(row['bound'], 2)}",
            interval(row["measured"]),
            row["verdict"],
        )
        for row in gate["inequalities"]
    )
    return Gate(name, words.GATES.get(name, "a gate of this run's settings"), gate["verdict"], rows)


def arms_section(run: Run) -> Section:
    """Every arm with its picture, its figures and what it is."""
    found = run.result["arms"]
    order = sorted(found, key=lambda arm: found[arm]["nll"]["estimate"])
    names = {"nll": "NLL", "excess": "excess", "ncr": "NCR", "top1": "top-1", "tqr": "TQR", "js": "JS"}
    shown = [key for key in names if key in found[run.handover]]
    rows = tuple((label(arm, run.handover), *(_cell(key, found[arm][key]) for key in shown)) for arm in order)
    meanings = tuple((label(arm, run.handover), words.meaning(arm)) for arm in order)
    return Section(
        "Every arm",
        (
            "NLL is how surprised the receiver is by the true next tokens; smaller is better. Brackets are 95 % "
            "intervals over documents.",
        ),
        (Picture("arms", "NLL of every arm, and its paired distance to native", plots.arms(run)),),
        (
            Table(
                ("arm", *(names[key] for key in shown)),
                rows,
                bold=frozenset({order.index(run.handover)}),
            ),
            Table(("arm", "what it is"), meanings, words=_TWO),
        ),
    )


def _cell(key: str, found: dict[str, Any]) -> str:
    digits = {"nll": 3, "excess": 3, "ncr": 2, "top1": 3}
    if key in digits:
        return interval(found, digits[key])
    return number(found["estimate"], 2 if key == "tqr" else 4)  # no interval, for the width of a page


def _cost(run: Run) -> Section | None:
    picture = plots.cost(run)
    if picture is None:
        return None
    rows = tuple(
        (
            f"{row['tokens']:,}",
            label(row["handover"], run.handover),
            label(row["plain"], run.handover),
            interval(row["difference"], sign=True),
            words.side(row["difference"]),
        )
        for row in run.result["equal_cost"]
    )
    header = ("tokens read", "hand-over", "plain read", "difference", "the hand-over is")
    return Section(
        "Cost against quality",
        (
            "What a user would do without a bridge: let the receiver read the end of the prefix. A bridge is worth "
            "its name where its line lies below that of the plain read.",
        ),
        (Picture("cost", "Excess NLL against the prefix tokens that the receiver reads itself", picture),),
        (Table(header, rows, words=frozenset({0, 1, 2, 4})),) if rows else (),
    )


def _positions(run: Run) -> Section:
    picture = Picture("positions", "Excess NLL by scored position", plots.positions(run))
    words_ = (
        "Thin: mean over documents. Thick: running mean of five. A wrong state shows in the first tokens."
    )
    return Section("Position by position", (words_,), (picture,))


def _documents(run: Run) -> Section:
    pictures = [Picture("documents", "NLL of each document, native against hand-over", plots.documents(run))]
    said = ["Points near the diagonal are documents on which the hand-over is as good as reading."]
    if (donor := plots.donors(run)) is not None:
        pictures.append(
            Picture("donors", "NLL of each document with its own and with another's state", donor)
        )
        found = run.result["differences"]["handover − wrong donor"]
        said.append(
            "Donor control: with another document's state of equal length the advantage must vanish. Own minus "
            f"other: {interval(found, sign=True)}."
        )
    return Section("Document by document, and the donor control", tuple(said), tuple(pictures))


def effects_section(run: Run) -> Section | None:
    """Factorial effects of translating, for a run that scored all eight plans."""
    picture = plots.effects(run)
    if picture is None:
        return None
    rows = tuple((name, interval(found, 4, sign=True)) for name, found in run.result["effects"].items())
    return Section(
        "Translate or copy",
        (
            "All eight combinations of translating (T) or copying (D) keys and values (K), recurrent matrices (R) "
            "and convolution history (C). An effect is the mean NLL of T less that of D; × marks interactions.",
        ),
        (Picture("effects", "Main effects and interactions of translating", picture),),
        (Table(("effect", "NLL, nats per token"), rows),),
    )


def _identities(run: Run) -> Section:
    whose, ground, config = run.result["provenance"], run.result["environment"], run.config
    ends = ("source", "receiver")
    backend = whose["backend"]
    rows = [
        ("model", *(short(whose[end]["name"]) for end in ends)),
        ("weights (sampled sha256)", *(whose[end]["weights"][:16] for end in ends)),
        *(
            (key, *(backend[end].get(key, "") for end in ends))
            for key in dict.fromkeys([*backend["source"], *backend["receiver"]])
        ),
    ]
    settings = (
        ("bridge (sha256)", whose["bridge"][:16]),
        ("plan", whose["plan"]),
        ("tokenizer (sha256)", whose["tokenizer"][:16]),
        (
            "documents",
            f"{len(whose['documents'])} of {short(config.documents.source)}, after {config.skip} skipped",
        ),
        ("first and last document", f"{whose['documents'][0]}, {whose['documents'][-1]}"),
        ("prefix and scored tokens", f"{config.prefix:,} and {config.targets}"),
        ("batch size", str(config.batch_size)),
        ("seed, bootstrap resamples", f"{config.seed}, {config.resamples:,}"),
        *((key, str(value)) for key, value in ground.items()),
    )
    return Section(
        "Whose numbers these are",
        (),
        (),
        (
            Table(("", "source", "receiver"), tuple(rows), words=_TWO | {2}),
            Table(("setting", "value"), settings, words=_TWO),
        ),
    )


def _terms(run: Run) -> Section:
    terms = [
        ("NLL", "negative log-likelihood of the true next tokens, nats per token; smaller is better"),
        (
            "excess",
            "NLL of an arm less NLL of native, paired by document; 0 is as good as reading the prefix",
        ),
        (
            "NCR",
            "(empty − arm) / (empty − native): share of the prefix's worth recovered; 1 is native, 0 no prefix",
        ),
        (
            "TQR",
            "(source − arm) / (source − native): the share of the receiver's advantage over the source kept",
        ),
        ("top-1", "share of positions at which the arm's most likely token is native's"),
        ("JS", "Jensen-Shannon divergence of the arm's next-token distribution from native's, nats"),
        (
            "[low, high]",
            f"95 % percentile bootstrap over documents, {run.config.resamples:,} resamples, paired",
        ),
        (
            "pass, fail",
            "the whole interval satisfies the inequality, or none of it; in between it is inconclusive",
        ),
        ("plan", "T translates, D copies; in the order K (keys, values), R (recurrent), C (convolution)"),
        ("bridge token", "the one true token that every arm reads before the first scored one"),
    ]
    return Section("Terms", (), (), (Table(("term", "meaning"), tuple(terms), words=_TWO),))


def short(name: str) -> str:
    """The last part of a folder's path; a hub name as it is."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".", "~")) else name
