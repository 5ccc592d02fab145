"""From all tables of a run to `result.json`: the scores' summary, and those of the sections that were run.

Knows tables, no models: the stored tables give the same result again, which is how a report is verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from statebridge.evaluate.config import EvaluateConfig
from statebridge.evaluate.summary import plain, summarise
from statebridge.stats import Bootstrap, mean


def summarise_run(tables: Mapping[str, pa.Table], handover: str, config: EvaluateConfig) -> dict[str, Any]:
    """Everything of `result.json` that follows from tables and settings.

    Parameters
    ----------
    tables
        "scores", and any of "recall", "generation", "residuals".
    handover
        The arm that is the hand-over.
    config
        Settings of the run.
    """
    result = summarise(tables["scores"], handover, config)
    bootstrap = Bootstrap(config.seed, config.resamples)
    if "recall" in tables:
        result["recall"] = _recall(tables["recall"])
    if "generation" in tables:
        result["generation"] = _generation(tables["generation"], bootstrap)
    if "residuals" in tables:
        result["residuals"] = _residuals(tables["residuals"])
    if config.branches:
        result["branches"] = {
            branch.name: {"prefix": branch.prefix, "behind": branch.behind}
            | _status(branch.on_request, branch.behind, result["gates"])
            for branch in config.branches
        }
    return result


def _status(on_request: bool, behind: str, gates: Mapping[str, Any]) -> dict[str, str]:
    found = gates[behind]["verdict"] if behind in gates else "not measured"
    status = "behind its gate" if found == "pass" else "on request" if on_request else "not run"
    return {"gate": found, "status": status}


def _recall(table: pa.Table) -> dict[str, Any]:
    """Arm -> depth -> share of items recalled with its Wilson interval.

    A bootstrap of hits that are all alike would claim to know the share exactly.
    """
    hits: dict[str, dict[str, list[bool]]] = {}
    for row in table.to_pylist():
        hits.setdefault(row["arm"], {}).setdefault(str(row["depth"]), []).append(row["hit"])
    return {
        arm: {depth: wilson(sum(found), len(found)) for depth, found in depths.items()}
        for arm, depths in hits.items()
    }


def wilson(hits: int, n: int) -> dict[str, Any]:
    """Share of hits with its 95 % Wilson score interval (Wilson 1927)."""
    z = 1.959963984540054
    centre = (hits + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * float(np.sqrt(hits * (n - hits) / n + z * z / 4))
    share = hits / n  # which rounding must not leave outside of its interval
    return {
        "estimate": share,
        "low": min(max(centre - half, 0.0), share),
        "high": max(min(centre + half, 1.0), share),
        "level": 0.95,
        "n": n,
    }


def _generation(table: pa.Table, bootstrap: Bootstrap) -> dict[str, Any]:
    """Mode -> arm -> agreement with native and position of the first different token."""
    tokens: dict[tuple[str, str], dict[str, list[int]]] = {}
    for row in table.to_pylist():
        tokens.setdefault((row["mode"], row["arm"]), {})[row["document"]] = row["tokens"]
    found: dict[str, Any] = {}
    for (mode, arm), by_document in tokens.items():
        if arm == "native":
            continue
        native = np.array([tokens[mode, "native"][document] for document in by_document])
        same = np.array(list(by_document.values())) == native  # [documents, tokens]
        width = same.shape[1]
        first = np.where(same.all(1), width, (~same).argmax(1))
        found.setdefault(mode, {})[arm] = {
            "agreement": plain(bootstrap(mean, same.mean(1))),
            "divergence": plain(bootstrap(mean, first)),
            "identical": int((first == width).sum()),
            "tokens": width,
        }
    return found


def _residuals(table: pa.Table) -> list[dict[str, Any]]:
    """Mean residual of every layer and field over documents."""
    values: dict[tuple[int, str], list[float]] = {}
    for row in table.to_pylist():
        values.setdefault((row["layer"], row["field"]), []).append(row["residual"])
    return [
        {"layer": layer, "field": name, "mean": float(np.mean(found)), "largest": max(found)}
        for (layer, name), found in values.items()
    ]
