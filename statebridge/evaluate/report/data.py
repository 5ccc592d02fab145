"""A finished run as the report sees it: settings, result, tables; and the check that they belong together.

Knows a run's folder alone. `verify` recomputes every figure of `result.json` that follows from the stored tables,
by the function that made it, and names each one that differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from statebridge.config import parse_config
from statebridge.errors import StatebridgeError
from statebridge.evaluate.config import EvaluateConfig
from statebridge.evaluate.summary import scores_by_arm
from statebridge.evaluate.summary_run import summarise_run

TABLES = ("scores", "recall", "generation", "residuals")
#: Parts of a result that were noted when it was made and cannot follow from the tables.
NOTED = frozenset({"bridge", "environment", "provenance"})


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    folder
        Where it lies.
    config
        Its settings.
    result
        The content of `result.json`.
    tables
        Name -> table: "scores" always, the others where they were measured.
    """

    folder: Path
    config: EvaluateConfig
    result: Mapping[str, Any]
    tables: Mapping[str, pa.Table]

    @property
    def handover(self) -> str:
        """The arm that is the hand-over."""
        return str(self.result["handover"])

    @cached_property
    def nll(self) -> dict[str, np.ndarray[Any, Any]]:
        """Arm -> negative log-likelihoods [documents, positions]."""
        return scores_by_arm(self.tables["scores"], "nll")[1]

    def branches(self) -> dict[str, Run | None]:
        """Name -> run of each branch that was due; None for one that is not finished."""
        found: dict[str, Run | None] = {}
        for name, branch in self.result.get("branches", {}).items():
            if branch["status"] != "not run":
                folder = self.folder / "branches" / name
                found[name] = load_run(folder) if (folder / "result.json").exists() else None
        return found


def load_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises
    ------
    StatebridgeError
        When it is not a finished run, or a file in it is damaged; names the file.
    """
    for name in ("config.yaml", "result.json", "scores.parquet"):
        if not (folder / name).is_file():
            raise StatebridgeError(
                f"{folder} is not a finished run: {name} is missing; run `statebridge evaluate --out {folder}` to "
                "its end."
            )
    name = "config.yaml"
    try:
        settings = yaml.safe_load((folder / name).read_text(encoding="utf-8"))["evaluate"]
        config = parse_config(EvaluateConfig, dict(settings), str(folder / name))
        name = "result.json"
        result = json.loads((folder / name).read_text(encoding="utf-8"))
        result["handover"], result["arms"]
        tables = {}
        for table in TABLES:
            name = f"{table}.parquet"
            if (folder / name).exists():
                tables[table] = pq.read_table(folder / name)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, pa.ArrowException) as error:
        raise StatebridgeError(
            f"{folder / name} is damaged ({error!r}); delete it and run the evaluation again, which keeps its parts."
        ) from error
    return Run(folder, config, result, tables)


def verify(run: Run) -> list[str]:
    """One line for each figure of `result.json` that the stored tables do not give; branches included."""
    again = json.loads(json.dumps(summarise_run(run.tables, run.handover, run.config)))
    stored = {key: value for key, value in run.result.items() if key not in NOTED}
    found = differences(stored, again)
    for name, branch in run.branches().items():
        found += [f"branches/{name}: {line}" for line in (verify(branch) if branch else ["not finished"])]
    return found


def differences(stored: Any, again: Any, path: str = "") -> list[str]:
    """One line for each value of two JSON values that is not the same, floats to 1e-9; paths begin with `path`."""
    if isinstance(stored, dict) and isinstance(again, dict):
        keys = dict.fromkeys((*again, *stored))
        return [
            line
            for key in keys
            for line in differences(
                stored.get(key, "nothing"), again.get(key, "nothing"), f"{path}.{key}" if path else key
            )
        ]
    if isinstance(stored, list) and isinstance(again, list) and len(stored) == len(again):
        return [
            line
            for i, (a, b) in enumerate(zip(stored, again, strict=True))
            for line in differences(a, b, f"{path}[{i}]")
        ]
    numbers = [isinstance(x, (int, float)) and not isinstance(x, bool) for x in (stored, again)]
    # other releases of numpy may sum in another order
    same = math.isclose(stored, again, rel_tol=1e-9, abs_tol=1e-9) if all(numbers) else stored == again
    return [] if same else [f"{path}: result.json says {stored!r}, the tables give {again!r}"]
