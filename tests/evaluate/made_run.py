"""A finished run made of invented tables: what a report is tested on, without any model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from statebridge.evaluate.config import BranchConfig, EvaluateConfig, GenerationConfig, RecallConfig
from statebridge.evaluate.summary_run import summarise_run

DOCUMENTS, POSITIONS = 12, 7
#: Arm -> excess over native. At equal cost the hand-over wins at 0 and 16 and loses at 64.
EXCESS = {
    "native": 0.0,
    "source": 0.2,
    "empty": 0.5,
    "window 16": 0.4,
    "window 64": 0.05,
    "calibrated": 0.1,
    "TDD": 0.14,
    "DDD": 0.16,
    "DDT": 0.17,
    "DTD": 0.19,
    "DTT": 0.2,
    "TDT": 0.15,
    "TTD": 0.18,
    "TTT": 0.185,
    "handover + 16": 0.09,
    "handover + 64": 0.08,
    "kv only": 0.3,
    "wrong donor": 0.6,
}
PROVENANCE = {
    "source": {"name": "somewhere/small", "weights": "a" * 64},
    "receiver": {"name": "/home/someone/big", "weights": "b" * 64},
    "tokenizer": "c" * 64,
    "plan": "TDD",
    "bridge": "d" * 64,
    "backend": {end: {"device": "cpu", "dtype": "float32"} for end in ("source", "receiver")},
    "documents": [f"book <{i}>" for i in range(DOCUMENTS)],
}
CALIBRATION = {
    "grid": [
        {
            "rank": rank,
            "penalty": 0.01,
            "step": 20,
            "validation_kl": 0.03 / rank,
            "curve": [{"step": step, "validation_kl": 0.1 / (rank + step)} for step in (0, 10, 20)],
        }
        for rank in (2, 4)
    ],
    "chosen": {"rank": 4, "penalty": 0.01, "step": 20, "validation_kl": 0.0075},
    "validation_kl": {"plan": [0.2, 0.4], "calibrated": [0.1, 0.2], "without C": [0.1, 0.22]},
    "trainable_values": 1234,
}


def scores(arms: dict[str, float]) -> pa.Table:
    """Scores that lie around each arm's excess, the same spread of documents under all of them."""
    rng = np.random.default_rng(5)
    base = 3 + rng.normal(0, 0.3, (DOCUMENTS, 1)) + rng.normal(0, 0.5, (1, POSITIONS))
    rows: list[dict[str, Any]] = []
    for arm, excess in arms.items():
        values = base + (excess and excess + rng.normal(0, 0.01, (*base.shape[:1], POSITIONS)))
        rows += [
            {
                "document": PROVENANCE["documents"][d],
                "arm": arm,
                "position": p,
                "nll": values[d, p],
                "top1": float((d + p) % 10 >= 10 * excess),
                "kl": excess / 3,
                "js": excess / 5,
            }
            for d in range(DOCUMENTS)
            for p in range(POSITIONS)
        ]
    return pa.Table.from_pylist(rows)


def full_tables() -> dict[str, pa.Table]:
    """Every table a run can have."""
    recall = [
        {"arm": arm, "depth": depth, "item": item, "hit": item % 4 < hits}
        for arm, hits in {"native": 4, "calibrated": 3, "empty": 0}.items()
        for depth in (64, 256)
        for item in range(8)
    ]
    generation = [
        {"document": f"book {d}", "mode": mode, "arm": arm, "tokens": tokens, "text": f"{arm} | <b>wrote</b>"}
        for mode in ("greedy", "sampled")
        for arm, tokens in {"native": [1, 2, 3], "calibrated": [1, 2, 4], "empty": [0, 2, 3]}.items()
        for d in range(2)
    ]
    residuals = [
        {"document": "book 0", "layer": layer, "field": field, "residual": 0.01 * (layer + 1)}
        for layer, field in ((0, "recurrent_state"), (0, "conv_state"), (1, "key"), (1, "value"))
    ]
    tables = {"recall": recall, "generation": generation, "residuals": residuals}
    return {"scores": scores(EXCESS)} | {name: pa.Table.from_pylist(rows) for name, rows in tables.items()}


def full_config() -> EvaluateConfig:
    """Settings under which every section exists."""
    return EvaluateConfig(
        count=DOCUMENTS,
        targets=POSITIONS,
        plans="all",
        windows=(16, 64),
        handover_windows=(16, 64),
        resamples=100,
        recall=RecallConfig(depths=(64, 256), items_per_depth=8),
        generation=GenerationConfig(documents=2, new_tokens=3),
        branches=(BranchConfig("long", 16384),),
    )


def write(folder: Path, tables: dict[str, pa.Table], handover: str, config: EvaluateConfig) -> Path:
    """Write a run's folder as `evaluate` does."""
    folder.mkdir()
    result = summarise_run(tables, handover, config) | {
        "bridge": {"errors": {}, "calibration": CALIBRATION if handover == "calibrated" else {}},
        "environment": {"python": "3.12"},
        "provenance": PROVENANCE,
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    settings = json.loads(json.dumps(dataclasses.asdict(config)))
    (folder / "config.yaml").write_text(yaml.safe_dump({"evaluate": settings}, allow_unicode=True))
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet")
    return folder
