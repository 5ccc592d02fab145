"""Two processes share the documents of every stage: the scores are those of one process."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from statebridge.reproduce import SuiteConfig, verify_suite
from statebridge.reproduce.stages import read_json


@pytest.mark.slow
def test_two_processes_give_the_scores_of_one(config: SuiteConfig, finished: Path, tmp_path: Path) -> None:
    """Merged moments differ by float64 rounding, so scores agree to 1e-4 and choices exactly."""
    settings = tmp_path / "config.yaml"
    settings.write_text(yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(config)))))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # what `accelerate launch` starts for GPUs; on CPU it starts a single process
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    command += ["-m", "statebridge", "reproduce", "all", "--config", str(settings)]
    command += ["--out", str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = (read_json(folder / "manifest.json") for folder in (tmp_path / "run", finished))
    assert ours["documents"] == theirs["documents"]
    assert all(record["processes"] == 2 for record in ours["stages"].values())
    for name, record in theirs["stages"].items():
        for key in ("source_tokens", "receiver_tokens"):
            # each process looks at each model once, and tries the backward pass once
            slack = 20 if name == "calibrate" else 2
            assert ours["stages"][name]["cost"][key] == pytest.approx(record["cost"][key], abs=slack), name
    chosen = [read_json(folder / "selection" / "selection.json") for folder in (tmp_path / "run", finished)]
    assert chosen[0]["plan"] == chosen[1]["plan"]
    for experiment, figures in theirs["figures"].items():
        for key, figure in figures.items():
            if key in ("tqr", "ncr", "remaining_gap_reduction") or "fraction" in key:
                continue  # ratios of small differences magnify the rounding
            found = ours["figures"][experiment][key]["estimate"]
            assert found == pytest.approx(figure["estimate"], abs=1e-4), key
    assert verify_suite(tmp_path / "run") == []
