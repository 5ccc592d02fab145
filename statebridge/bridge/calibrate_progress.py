"""A calibrator's training as it stands: one value, one file, replaced as a whole.

Knows tensors and files, no models and no loss.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from statebridge.state.file import atomic_file


@dataclass
class Training:
    """Everything that changes while the grid is searched.

    Attributes
    ----------
    point, step
        Grid point in work, and its steps done.
    best_kl, best_step, waited
        Best validation KL of the point, when it was, and evaluations since.
    curve
        One entry per evaluation of the point.
    finished
        One entry per finished point, its curve included.
    tensors
        Of the point: "now" and "best" calibrators and Adam's moments "adam"; the "chosen" calibrator of the
        finished points.
    """

    point: int = 0
    step: int = 0
    best_kl: float = float("inf")
    best_step: int = 0
    waited: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    finished: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Replace the file at `path`."""
        values = {name: value for name, value in vars(self).items() if name != "tensors"}
        flat = {
            f"{group}/{name}": tensor.cpu().clone()
            for group, tensors in self.tensors.items()
            for name, tensor in tensors.items()
        }
        with atomic_file(path) as temporary:
            save_file(flat, temporary, metadata={"training": json.dumps(values)})

    @classmethod
    def load(cls, path: Path) -> Training:
        """Read the file at `path`, or begin where there is none."""
        if not path.exists():
            return cls()
        with safetensors.safe_open(path, framework="pt") as file:
            training = cls(**json.loads(file.metadata()["training"]))
            for key in list(file.keys()):
                group, _, name = key.partition("/")
                training.tensors.setdefault(group, {})[name] = file.get_tensor(key).clone()
        return training

    def close_point(self, rank: int, weight: float) -> None:
        """Keep what the point in work came to, and go to the next."""
        if self.best_kl < min((point["validation_kl"] for point in self.finished), default=float("inf")):
            self.tensors["chosen"] = self.tensors["best"]
        found = {"rank": rank, "penalty": weight, "step": self.best_step, "validation_kl": self.best_kl}
        self.finished.append({**found, "curve": self.curve})
        self.tensors = {"chosen": self.tensors["chosen"]}
        self.point, self.step, self.best_kl, self.best_step, self.waited = (
            self.point + 1,
            0,
            float("inf"),
            0,
            0,
        )
        self.curve = []


def moments(adam: torch.optim.Adam) -> dict[str, Tensor]:
    """Adam's running averages by parameter number."""
    return {
        f"{number}.{name}": values[name]
        for number, values in adam.state_dict()["state"].items()
        for name in ("exp_avg", "exp_avg_sq")
    }


def load_moments(adam: torch.optim.Adam, moments: dict[str, Tensor], step: int) -> None:
    """Put back what `moments` gave after `step` steps."""
    content = adam.state_dict()
    for name, tensor in moments.items():
        number, _, kind = name.partition(".")
        values = content["state"].setdefault(int(number), {"step": torch.tensor(float(step))})
        values[kind] = tensor
    adam.load_state_dict(content)
