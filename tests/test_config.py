"""Configs: defaults, file, settings, in that order; every wrong key named by its path."""

from __future__ import annotations

from pathlib import Path

import pytest

from statebridge.bridge import DocumentsConfig, FitConfig
from statebridge.config import load_config, parse_config
from statebridge.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("fit*.yaml"))


def test_defaults_then_file_then_settings(tmp_path: Path) -> None:
    path = tmp_path / "fit.yaml"
    path.write_text("fit_documents: 12\nseed: 3\ndocuments: {source: books}\nridge_alphas: [1e-6, 0.5]\n")
    assert load_config(FitConfig) == FitConfig()
    config = load_config(
        FitConfig, path, ["seed=4", "documents.window=random", "checkpoints=[8, 16]", "plan=TTT"]
    )
    assert config == FitConfig(
        documents=DocumentsConfig(source="books", window="random"),
        fit_documents=12,
        checkpoints=(8, 16),
        ridge_alphas=(1e-6, 0.5),
        plan="TTT",
        seed=4,
    )
    path.write_text("# nothing yet\n")
    assert load_config(FitConfig, path) == FitConfig()


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("fit_document: 3", [], "fit.yaml: unknown key fit_document; known are documents, fit_documents"),
        ("documents: {sauce: x}", [], "unknown key documents.sauce; known are source"),
        ("", ["documents.sauce=x"], "unknown key documents.sauce"),
        ("fit_documents: many", [], r"fit_documents: Input should be a valid integer.*\(found 'many'\)"),
        ("documents: {window: middle}", [], "documents.window: .*'start' or 'random'"),
        ("plan: TXD", [], "fit.yaml: 'TXD' is no choice"),
        ("documents: 3", [], "documents: "),
        ("fit_documents: 1", [], "fit.yaml: fit_documents must be at least 2, found 1"),
        ("- a\n- b", [], "must be a mapping"),
        ("a: [", [], "is not valid YAML"),
        ("1: 2", [], "unknown key 1"),
        ("", ["seed"], "must have the form a.b=value"),
        ("", ["=3"], "must have the form a.b=value"),
        ("seed: 3", ["seed.deep=3"], "seed holds a value, not a group of keys"),
        ("", ["seed=[1"], "is not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, settings: list[str], message: str) -> None:
    path = tmp_path / "fit.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(FitConfig, path, settings)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(FitConfig, tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(FitConfig, tmp_path / "binary.yaml")


def test_a_mapping_is_not_changed() -> None:
    data = {"documents": {"source": "x"}}
    assert parse_config(FitConfig, data).documents.source == "x"
    assert data == {"documents": {"source": "x"}}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_fit_config_is_valid(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert load_config(FitConfig, path)
    keys = {line.split(":")[0].strip("# ") for line in text.splitlines() if ":" in line}
    assert keys >= {
        "source",
        "fit_documents",
        "validation_documents",
        "checkpoints",
        "batch_size",
        "plan",
        "seed",
    }


def test_there_are_fit_configs() -> None:
    assert len(CONFIGS) >= 2
