"""`statebridge sessions fingerprint`: both forms of output, both groupings, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_pair
from typer.testing import CliRunner

from statebridge.cli.app import app
from statebridge.errors import ConfigError

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_pair.pair().source.save_pretrained(path)
    tiny_pair.tokenizer().save_pretrained(path)
    return path


def run(*arguments: str, code: int = 0) -> str:
    result = RUNNER.invoke(app, ["sessions", "fingerprint", *arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def test_the_table_says_what_is_needed(folder, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run(str(folder), "--lengths", "8,24")
    last = shown.strip().splitlines()[-1]
    assert last.startswith("needed at 24 tokens: ")
    needed = last.removeprefix("needed at 24 tokens: ").split(";")[0].split(", ")
    assert set(needed) == {"key", "value", "recurrent_state", "conv_state", "flags", "position", "pad_mask"}
    assert "growing" in shown


def test_json_by_layer_with_reading_again(folder) -> None:
    found = json.loads(
        run(str(folder), "--lengths", "12", "--group", "layer", "--reread", "--format", "json")
    )
    assert set(found["needed"]) == {"token_ids", "pad_mask"}
    layers = {finding["name"]: finding for finding in found["findings"]}
    assert layers["layers.0.recurrent"]["role"] == "derivable"
    assert layers["layers.3.attention"]["nbytes"]["12"] == 2 * 2 * 2 * 12 * 16 * 4


@pytest.mark.parametrize("lengths", ["", "3", "8,x"])
def test_lengths_that_are_none(folder, lengths) -> None:
    with pytest.raises(ConfigError, match="--lengths"):
        run(str(folder), "--lengths", lengths)


def test_a_model_without_a_tokenizer(tmp_path) -> None:
    tiny_pair.pair().source.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer"):
        run(str(tmp_path))
