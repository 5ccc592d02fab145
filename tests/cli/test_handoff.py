"""`statebridge handoff`: text to stdout as it comes, the account to stderr, mistakes as errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
import torch
import typer
from typer.testing import CliRunner, Result

import statebridge
from statebridge.bridge import Bridge
from statebridge.cli.handoff import handoff
from statebridge.errors import ConfigError, DocumentError, StatebridgeError, StateFileError

APP = typer.Typer()
APP.command()(handoff)
PROMPT = "The source reads this, the receiver answers."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name both models and a bridge that copies."""
    root = tmp_path_factory.mktemp("handoff")
    pair = tiny_pair.pair()
    for name, model in (("small", pair.source), ("big", pair.receiver)):
        model.save_pretrained(root / name)
        pair.tokenizer.save_pretrained(root / name)
    Bridge.direct(pair.source_identity, pair.receiver_identity).save_pretrained(root / "bridge")
    names = {"source": "small", "receiver": "big", "bridge": "bridge"}
    return [f"--{option}={root / folder}" for option, folder in names.items()]


def run(models: list[str], *options: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(APP, [*models, "--max-new-tokens=8", *options], input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def record(models: list[str], *options: str, stdin: str | None = None) -> Any:
    return json.loads(run(models, "--format=json", *options, stdin=stdin).stdout)


def expected(**options: Any) -> Any:
    pair = tiny_pair.pair()
    bridge = Bridge.direct(pair.source_identity, pair.receiver_identity)
    return pair.handoff(PROMPT, bridge=bridge, **{"max_new_tokens": 8, "do_sample": False, **options})


def test_text_and_account(models: list[str]) -> None:
    result = run(models, PROMPT)
    assert result.exit_code == 0
    assert result.stdout == expected().text + "\n"
    for line in (
        "read by the source    43 tokens in ",
        "handed over           K 11.0 kB, R 4.6 kB, C 3.8 kB in ",
        "(plan DDD)",
        "read by the receiver  1 bridge token, 0 prefix tokens; first token after ",
        "generated             8 tokens in ",
    ):
        assert line in result.stderr


def test_the_text_comes_while_it_is_made(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, int]] = []
    passes: list[int] = []
    monkeypatch.setattr(
        "transformers.TextStreamer.put", lambda self, value: written.append((str(value.numel()), len(passes)))
    )
    monkeypatch.setattr("transformers.TextStreamer.end", lambda self: None)
    from statebridge.bridge.handoff import _FirstToken

    call = _FirstToken.__call__
    monkeypatch.setattr(_FirstToken, "__call__", lambda *args: (passes.append(1), call(*args))[1])
    run(models, PROMPT)
    assert written == [("44", 0), *(("1", n) for n in range(1, 9))]


def test_prompts_from_file_and_stdin(models: list[str], tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    ids = expected().new_ids.tolist()
    assert record(models, PROMPT)["new_ids"] == ids
    assert record(models, f"--prompt-file={tmp_path / 'prompt.txt'}")["new_ids"] == ids
    assert record(models, stdin=PROMPT)["new_ids"] == ids
    chat = record(models, "--chat", "Hi")
    assert chat["prefix_tokens"] + chat["bridge_tokens"] == len("<user>Hi\n<assistant>")


def test_json_holds_the_whole_account(models: list[str]) -> None:
    reply = expected(bridge_tokens=5)
    found = record(models, PROMPT, "--bridge-tokens=5")
    assert found["text"] == reply.text
    assert found["moved_bytes"] == reply.moved_bytes
    assert (found["prefix_tokens"], found["bridge_tokens"], found["prefix_tokens_processed"]) == (39, 5, 0)
    assert found["plan"] == "DDD"
    assert set(found["seconds"]) == set(reply.seconds)


def test_sampling_stops_and_other_options(models: list[str]) -> None:
    first, same, other = (record(models, PROMPT, "--temperature=2", f"--seed={seed}") for seed in (1, 1, 2))
    assert first["new_ids"] == same["new_ids"] != other["new_ids"]
    only = record(models, PROMPT, "--temperature=2", "--set=top_k=1")
    assert only["new_ids"] == expected().new_ids.tolist()
    letters = [tiny_pair.tokenizer().decode([token]) for token in only["new_ids"][0]]
    stop = next(letter for letter in letters if letter.isascii())
    assert len(record(models, PROMPT, f"--stop={stop}")["new_ids"][0]) == letters.index(stop) + 1
    beams = run(models, PROMPT, "--set=num_beams=2")
    assert beams.stdout == expected(num_beams=2).text + "\n"


def test_a_saved_state_is_not_read_again(models: list[str], tmp_path: Path) -> None:
    ids = torch.tensor([tiny_pair.tokenizer()(PROMPT)["input_ids"]])[:, :20]
    statebridge.prefill(tiny_pair.pair().source, ids).state().save(tmp_path / "s.safetensors")
    found = record(models, PROMPT, f"--state={tmp_path / 's.safetensors'}")
    assert found["prefix_tokens"] == 20
    assert found["seconds"]["source_prefill"] == 0
    assert "20 tokens before" in run(models, PROMPT, f"--state={tmp_path / 's.safetensors'}").stderr


@pytest.mark.parametrize(
    ("options", "error", "code"),
    [
        (["x", "--greedy", "--temperature=1"], ConfigError, 2),
        (["x", "--temperature=0"], ConfigError, 2),
        (["x", "--prompt-file=absent"], ConfigError, 2),
        (["--prompt-file=absent"], ConfigError, 2),
        (["some text", "--set=no_such_option=3"], ConfigError, 2),
        (["x", "--set=top_p"], ConfigError, 2),
        (["x", "--plan=XYZ"], ConfigError, 2),
        (["x"], DocumentError, 1),
        (["x", "--bridge=no/where"], StateFileError, 1),
        (["x", "--state=absent"], StateFileError, 1),
        (["some text", "--plan=TTT"], StatebridgeError, 4),
    ],
)
def test_errors(models: list[str], options: list[str], error: type[StatebridgeError], code: int) -> None:
    with pytest.raises(error) as raised:
        run(models, *options)
    assert raised.value.exit_code == code
    assert "\n" not in str(raised.value)
