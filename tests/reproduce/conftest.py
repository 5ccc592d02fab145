"""A whole reproduction on the tiny random pair, with documents of a few dozen tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_pair

from statebridge.bridge import CalibrateConfig, DocumentsConfig, FitConfig, ModelPair
from statebridge.evaluate.config import EvaluateConfig, GateConfig, published_gates
from statebridge.reproduce import SuiteConfig, reproduce
from statebridge.reproduce.config_parts import LongConfig, ModelsConfig, RestoreConfig, ShiftedConfig

PROSE = DocumentsConfig(source="installed:200")
LENGTHS = {"documents": PROSE, "count": 4, "prefix": 32, "targets": 6, "batch_size": 2, "resamples": 50}


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> SuiteConfig:
    """Settings of a run of a few seconds; the models' folders hold what `pair` gives."""
    folder, pair = tmp_path_factory.mktemp("models"), tiny_pair.pair()
    for end in ("source", "receiver"):
        getattr(pair, end).save_pretrained(folder / end)
        pair.tokenizer.save_pretrained(folder / end)
    gates = {"full state": published_gates()["full state"][:2]}
    far = {"near native": (GateConfig("excess", "<=", -9.0),)}
    return SuiteConfig(
        models=ModelsConfig(str(folder / "source"), str(folder / "receiver"), dtype="float32"),
        restore=RestoreConfig(contexts=2, lengths=(8, 16)),
        fit=FitConfig(PROSE, fit_documents=6, validation_documents=4, checkpoints=(16, 32), batch_size=4),
        e001=EvaluateConfig(**LENGTHS, plans="all", windows=(), gates=gates),
        selection=EvaluateConfig(**LENGTHS, plans="all", windows=(), controls=(), gates={}),
        calibrate=CalibrateConfig(
            prefix=32,
            positions=3,
            ranks=(2,),
            penalties=(0.01,),
            learning_rate=0.01,
            batch_size=3,
            micro_batch=3,
            max_steps=4,
            evaluate_every=2,
        ),
        e002=EvaluateConfig(**LENGTHS, plans="all", windows=(4,), handover_windows=(4,), gates=far),
        shifted={"further": ShiftedConfig(PROSE, count=2)},
        long=LongConfig(PROSE, prefix=40, count=2),
    )


@pytest.fixture(scope="session")
def opened() -> Callable[[], ModelPair]:
    """Gives the pair."""
    return tiny_pair.pair


@pytest.fixture(scope="session")
def finished(
    config: SuiteConfig, opened: Callable[[], ModelPair], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("run") / "run"
    reproduce(config, "all", folder, opened)
    return folder
