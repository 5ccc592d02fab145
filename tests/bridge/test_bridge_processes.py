"""Several processes share the documents and the fits: the answer is that of one process."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_pair
import torch

from statebridge.bridge import Bridge, FitConfig, fit_bridge
from statebridge.errors import ConfigError

SETTINGS = {**tiny_pair.SMALL, "batch_size": 2, "bilinear_iterations": 3}
SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(Path(tiny_pair.__file__).parent)!r})
import torch
torch.set_num_threads(1)
import tiny_pair
from statebridge.bridge import FitConfig, fit_bridge
from statebridge.errors import StatebridgeError
rank = os.environ["RANK"]
config = FitConfig(**{SETTINGS!r})
seen = []
try:
    bridge = fit_bridge(
        tiny_pair.pair(), tiny_pair.documents(14), config, work_dir=sys.argv[1] or None,
        progress=lambda *step: seen.append(step),
    )
except StatebridgeError as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
bridge.save_pretrained(f"{{sys.argv[2]}}/{{rank}}")
print("rank", rank, *[step[2] for step in seen if step[1] == 0])
"""


def launch(work_dir: str, out: Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = out / "script.py"
    script.write_text(SCRIPT)
    # what `accelerate launch` starts for GPUs; on CPU it starts a single process
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    command += [f"--master_port={port}", str(script), work_dir, str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    work = tmp_path / "work"
    done = launch(str(work), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    # 7 batches of 2 documents: 4 and 3 of them; 8 maps: 4 and 4
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 8 4",
        "rank 1 6 4",
    ]
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()
    two = Bridge.from_pretrained(tmp_path / "0")
    one = fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), FitConfig(**SETTINGS))
    assert two.config == one.config
    for key, translator in one.translators.items():
        for name, tensor in translator.tensors().items():
            # the same forward passes; float64 sums in another order, maps kept as float32
            torch.testing.assert_close(two.translators[key].tensors()[name], tensor, atol=1e-6, rtol=1e-5)
    with pytest.raises(ConfigError, match="another number of processes;"):
        fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), FitConfig(**SETTINGS), work_dir=work)


def test_several_processes_need_a_work_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "accelerate.PartialState", lambda cpu: SimpleNamespace(num_processes=2, process_index=0)
    )
    with pytest.raises(ConfigError, match="Several processes need a work_dir that all of them see"):
        fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), FitConfig(**SETTINGS))
