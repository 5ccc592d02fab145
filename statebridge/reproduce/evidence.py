"""The published scores in the form of a run of ours, so that the same code makes the same tables of them.

Reads the per-document tables that were published beside arXiv 2609.25053 (one row a document, one column an arm) and
writes a run's folder with experiment 1, the selection and experiment 2. Their scores are means over positions and
NLL alone, so that nothing is known by position, of agreement or of divergence.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from statebridge.errors import DocumentError
from statebridge.evaluate.config import EvaluateConfig
from statebridge.evaluate.report import load_run
from statebridge.evaluate.summary_run import summarise_run
from statebridge.reproduce.config import SuiteConfig
from statebridge.reproduce.figures import choose, figures_of
from statebridge.reproduce.report import write_suite_report
from statebridge.reproduce.stages import FULL, write_json

_ENDS = {"source": "4B", "receiver": "9B"}
#: Stage -> its file, the plan that was handed over, the hand-over, and columns that have another name here.
_TABLES: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "e001": (
        "e001_per_document.csv",
        FULL,
        FULL,
        {
            "kv_only": "kv only",
            "kv_gdn_direct": "TDD",
            "full_translated": FULL,
            "full_shuffled": "wrong donor",
        },
    ),
    "selection": ("e002_factorial_validation.csv", "TDD", "TDD", {}),
    # `base` is the column TDD once more
    "e002": ("e002_per_document.csv", "TDD", "calibrated", {"shuffled": "wrong donor", "base": ""}),
}


def write_published(evidence: Path, out: Path) -> tuple[Path, Path]:
    """Write the published scores as a run's folder, with its report.

    Parameters
    ----------
    evidence
        Folder of the published tables.
    out
        The run's folder.

    Returns
    -------
    tuple
        Paths of `report.html` and `report.md`.

    Raises
    ------
    DocumentError
        When a table is missing.
    """
    defaults = SuiteConfig()
    for stage, (name, plan, handover, columns) in _TABLES.items():
        table = _scores(evidence / name, columns)
        config = _settings(getattr(defaults, stage), table)
        _write_run(out / stage, table, config, plan, handover)
    write_json(out / "selection" / "selection.json", choose(load_run(out / "selection"), defaults.tie_width))
    write_json(
        out / "manifest.json",
        {
            "config": {"tie_width": defaults.tie_width},  # the rest is that of the defaults
            "models": {},
            "environment": {"scores": "published per document, not measured here"},
            "documents": {},
            "stages": {},
            "figures": figures_of(out),
        },
    )
    return write_suite_report(out)


def _scores(path: Path, columns: dict[str, str]) -> pa.Table:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise DocumentError(
            f"The published table {path} cannot be read ({error.strerror}); give the folder that holds it."
        ) from error
    found = []
    for row in rows:
        document = f"{path.stem.partition('_')[0]} document {row.pop('document_index')}"
        for column, value in row.items():
            if arm := columns.get(column, column):
                found.append({"document": document, "arm": arm, "position": 0, "nll": float(value)})
    return pa.Table.from_pylist(found)


def _settings(config: EvaluateConfig, table: pa.Table) -> EvaluateConfig:
    count = len(set(table["document"].to_pylist()))
    arms, gates = set(table["arm"].to_pylist()), {}
    for name, inequalities in config.gates.items():
        # K alone was not scored in experiment 2, and agreement was published as one number only
        gates[name] = tuple(
            gate
            for gate in inequalities
            if gate.metric != "top1" and gate.metric.removeprefix("handover − ") in {*arms, "excess", "ncr"}
        )
    return dataclasses.replace(config, count=count, plans=("TDD",), windows=(), gates=gates)


def _write_run(folder: Path, table: pa.Table, config: EvaluateConfig, plan: str, handover: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    models = {end: {"name": f"Qwen/Qwen3.5-{size}-Base", "weights": ""} for end, size in _ENDS.items()}
    provenance: dict[str, Any] = {
        **models,
        "tokenizer": "",
        "plan": plan,
        "bridge": "",
        "backend": {end: {} for end in _ENDS},
        "documents": list(dict.fromkeys(table["document"].to_pylist())),
    }
    noted = {"bridge": {"errors": {}, "calibration": {}}, "environment": {}, "provenance": provenance}
    result = summarise_run({"scores": table}, handover, config) | noted
    write_json(folder / "result.json", result)
    settings = json.loads(json.dumps({"evaluate": dataclasses.asdict(config), "provenance": provenance}))
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")
    pq.write_table(table, folder / "scores.parquet")
