"""Document sets: consecutive, disjoint, stored as they were drawn."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tiny_pair
import torch

from statebridge.bridge import DocumentsConfig, TokenWindow
from statebridge.errors import ConfigError, DocumentError, StatebridgeError
from statebridge.reproduce import SuiteConfig, with_sources
from statebridge.reproduce.config import SetRequest
from statebridge.reproduce.documents import draw, require_disjoint, store, stored

PROSE = DocumentsConfig(source="installed:200")


def request(count: int, length: int = 50, skip: int = 0, source: DocumentsConfig = PROSE) -> SetRequest:
    return SetRequest(source, count, length, skip, seed=0)


def names(sets: dict) -> dict[str, list[str]]:
    return {name: [window.id for window in windows] for name, windows in sets.items()}


def test_sets_of_one_source_are_consecutive() -> None:
    found = names(draw({"a": request(2), "b": request(2, length=30), "c": request(1, skip=2)}, tokens()))
    assert found == {
        "a": ["installed:0:0", "installed:0:200"],
        "b": ["installed:0:400", "installed:0:600"],
        "c": ["installed:0:1200"],
    }


def folders(tmp_path: Path, **files: tuple[str, str]) -> dict[str, SetRequest]:
    """A set of one document from a folder of its own, by name: (file name, text)."""
    sets = {}
    for name, (file, text) in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
        source = DocumentsConfig(source=str(tmp_path / name), window="random")
        sets[name] = request(1, length=40 + len(sets), source=source)
    return sets


TEXT = "The very same text, under two names and in windows that begin elsewhere. " * 5


def test_the_same_text_under_another_name_is_in_two_sets(tmp_path: Path) -> None:
    sets = folders(tmp_path, one=("a.txt", TEXT), two=("b.txt", TEXT))
    with pytest.raises(DocumentError, match=r"'b.txt' is in the sets one and two \(there as 'a.txt'\)"):
        draw(sets, tokens())


def test_one_file_name_in_two_folders_is_two_documents(tmp_path: Path) -> None:
    sets = folders(tmp_path, one=("a.txt", TEXT), two=("a.txt", TEXT.upper()))
    assert names(draw(sets, tokens())) == {"one": ["a.txt"], "two": ["a.txt"]}


def test_one_identifier_or_one_beginning_in_two_sets_is_refused() -> None:
    windows = [TokenWindow("x", torch.arange(9)), TokenWindow("x", torch.arange(12) + 1)]
    texts = {("s", "x"): "0", ("s", "y"): "1", ("t", "x"): "2"}
    with pytest.raises(DocumentError, match="'x' is in the sets a and b"):
        require_disjoint({"a": windows[:1], "b": windows[1:]}, {"a": "s", "b": "s"}, texts)
    with pytest.raises(DocumentError, match="'x' is twice in the set a"):
        require_disjoint({"a": windows}, {"a": "s"}, texts)
    require_disjoint({"a": windows[:1], "b": windows[1:]}, {"a": "s", "b": "t"}, texts)
    same = [TokenWindow("y", torch.arange(12))]  # begins as x does, and is longer
    with pytest.raises(DocumentError, match=r"'y' is in the sets a and b \(there as 'x'\)"):
        require_disjoint({"a": windows[:1], "b": same}, {"a": "s", "b": "s"}, texts)


def test_too_few_documents_name_their_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DocumentError, match=r"The set small from .* 2 documents of at least 50 tokens"):
        draw({"small": request(2, source=DocumentsConfig(source=str(tmp_path)))}, tokens())


def test_what_is_stored_comes_back_and_damage_is_seen(tmp_path: Path) -> None:
    sets = draw({"a": request(3), "b": request(1, length=40)}, tokens())
    store(sets, tmp_path)
    again = stored(tmp_path, ("a", "b"))
    assert names(again) == names(sets)
    assert all(torch.equal(x.ids, y.ids) for x, y in zip(again["a"], sets["a"], strict=True))
    path = tmp_path / "a.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StatebridgeError, match="are not those that were drawn"):
        stored(tmp_path, ("a",))
    path.write_bytes(content[:20])
    with pytest.raises(StatebridgeError, match="damaged"):
        stored(tmp_path, ("a",))


def test_sources_are_replaced_by_the_name_of_the_set(config: SuiteConfig) -> None:
    other = with_sources(config, {"e002": "books", "further": "more", "long": "longer"})
    sources = {name: found.documents.source for name, found in other.sets().items()}
    assert sources == {
        "fit": "installed:200",
        "selection": "installed:200",
        "e001": "installed:200",
        "e002": "books",
        "long": "longer",
        "further": "more",
    }
    with pytest.raises(ConfigError, match="there is no set 'e003'"):
        with_sources(config, {"e003": "books"})


def test_windows_are_long_enough_for_every_stage(config: SuiteConfig) -> None:
    calibrate = dataclasses.replace(config.calibrate, prefix=70)
    sets = dataclasses.replace(config, calibrate=calibrate).sets()
    assert {name: found.length for name, found in sets.items()} == {
        "fit": 73,
        "selection": 73,
        "e001": 39,
        "e002": 39,
        "long": 47,
        "further": 39,
    }


def tokens() -> object:
    return tiny_pair.tokenizer()
