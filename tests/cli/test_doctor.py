"""statebridge doctor and inspect, as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tiny
import tokenizers
import torch
import transformers

import statebridge
from statebridge.cli import app as app_module
from statebridge.cli.doctor import context_ids
from statebridge.evaluate import restore_control as control_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.build("qwen3_5").save_pretrained(path)
    return path


def call(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one call."""
    monkeypatch.setattr(sys, "argv", ["statebridge", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        app_module.main()
    out = capsys.readouterr()
    return int(left.value.code or 0), out.out, out.err


SMALL = ("--contexts", 2, "--lengths", "24,33")


def test_a_verdict_per_check(monkeypatch, capsys, folder) -> None:
    code, out, _ = call(monkeypatch, capsys, "doctor", folder, *SMALL)
    assert code == 0
    assert out.count("pass  ") == 8
    assert "max difference 0" in out
    code, out, _ = call(monkeypatch, capsys, "doctor", folder, *SMALL, "--format", "json", "--seed", 3)
    report = json.loads(out)
    assert code == 0
    assert report["passed"] is True
    assert [row["length"] for row in report["lengths"]] == [24, 33]
    assert all(check["passed"] for check in report["checks"])


def test_a_failed_check_leaves_with_3(monkeypatch, capsys, folder) -> None:
    real = control_module.continue_from

    def shifted(model, state, after):
        live = real(model, state, after)
        live.logits = live.logits.roll(1, -1)
        return live

    monkeypatch.setattr(control_module, "continue_from", shifted)
    code, out, _ = call(monkeypatch, capsys, "doctor", folder, *SMALL)
    assert code == 3
    assert "FAIL  restore" in out


def test_errors_are_one_sentence(monkeypatch, capsys, tmp_path) -> None:
    code, out, err = call(monkeypatch, capsys, "doctor", tmp_path / "absent", *SMALL)
    assert (code, out) == (4, "")
    assert err.strip().splitlines()[-1].startswith("error: The model ")
    assert "Traceback" not in err
    code, out, err = call(monkeypatch, capsys, "inspect", tmp_path / "absent")
    assert (code, out) == (1, "")
    assert err == f"error: {tmp_path / 'absent'} does not exist.\n"
    monkeypatch.setattr(sys, "argv", ["statebridge", "--debug", "inspect", str(tmp_path / "absent")])
    with pytest.raises(statebridge.errors.StateFileError):
        app_module.main()


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["doctor"], ["doctor", "x", "--lengths", "a,b"], ["doctor", "x", "--contexts", "0"]],
)
def test_wrong_usage_leaves_with_2(monkeypatch, capsys, arguments) -> None:
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert "Usage" in err


def test_inspect_prints_the_header(monkeypatch, capsys, tmp_path) -> None:
    path = tmp_path / "s.safetensors"
    state = statebridge.prefill(tiny.build("qwen3_5"), tiny.ids(2, 7)).state()
    state.save(path)
    code, out, _ = call(monkeypatch, capsys, "inspect", path, "--format", "json")
    told = json.loads(out)
    assert code == 0
    assert told["header"]["seen_tokens"] == [7, 7]
    assert told["tensors"]["layers.3.key"] == {"dtype": "F32", "shape": [2, 2, 7, 16]}
    code, out, _ = call(monkeypatch, capsys, "inspect", path)
    assert code == 0
    assert "3 × CR, K" in out
    assert told["digest"] in out.replace("\n", "").replace(" ", "")


def test_contexts_are_prose_where_there_is_a_tokenizer() -> None:
    model = tiny.build("qwen3_5")
    vocabulary = {chr(33 + i): i for i in range(90)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="!"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core)
    prose = context_ids(model, tokenizer, 3, 50, seed=1)
    assert prose.shape == (3, 50)
    counts = torch.bincount(context_ids(model, tokenizer, 20, 500, seed=1).flatten(), minlength=90)
    assert counts[vocabulary["e"]] > 5 * counts[vocabulary["q"]]  # English, not noise
    noise = context_ids(model, None, 3, 50, seed=1)
    assert noise.shape == (3, 50)
    assert torch.equal(noise, context_ids(model, None, 3, 50, seed=1))
    assert not torch.equal(noise, context_ids(model, None, 3, 50, seed=2))


def test_help_has_examples_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['statebridge', 'doctor', '--help']\n"
        "from statebridge.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "Examples" in done.stdout
    assert done.stdout.strip().splitlines()[-1] == "[]"
