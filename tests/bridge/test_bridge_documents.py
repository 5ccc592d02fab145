"""Documents from every kind of file and from the hub, and the windows that are cut from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import tiny_pair

from statebridge.bridge import Document, DocumentsConfig, load_documents, token_windows
from statebridge.errors import DocumentError

TEXTS = ["first text", "zweiter Text äöü", "третий 文字 🙂"]


def load(source: Path | str, **settings: Any) -> list[Document]:
    return list(load_documents(DocumentsConfig(str(source), **settings)))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_a_folder_of_texts_in_the_order_of_names(tmp_path: Path) -> None:
    for name, text in zip(("c.txt", "a.txt", "b.txt"), TEXTS, strict=True):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / ".hidden.jsonl").write_text("{}")
    (tmp_path / "index.csv").write_text("not read")
    assert load(tmp_path) == [
        Document("a.txt", TEXTS[1]),
        Document("b.txt", TEXTS[2]),
        Document("c.txt", TEXTS[0]),
    ]


def test_one_text_file(tmp_path: Path) -> None:
    path = tmp_path / "book.TXT"
    path.write_bytes(b"\xef\xbb\xbf" + TEXTS[1].encode() + b"\xff")
    assert load(path) == [Document("book.TXT", TEXTS[1] + "\N{REPLACEMENT CHARACTER}")]  # no byte order mark


def test_json_lines(tmp_path: Path) -> None:
    rows = [{"id": f"doc {i}", "body": text} for i, text in enumerate(TEXTS)]
    path = write_lines(tmp_path / "rows.jsonl", [*rows, {"id": "none", "body": None}])
    assert [d.text for d in load(path, text_field="body")] == [*TEXTS, ""]
    assert [d.id for d in load(path, text_field="body")] == [f"rows.jsonl:{i}" for i in range(4)]
    assert [d.id for d in load(path, text_field="body", id_field="id")] == ["doc 0", "doc 1", "doc 2", "none"]
    with pytest.raises(
        DocumentError, match=r"no column 'text'; its columns are id, body: set documents\.text_field"
    ):
        load(path)
    with pytest.raises(DocumentError, match="no column 'key'"):
        load(path, text_field="body", id_field="key")


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    assert [d.text for d in load(path)] == TEXTS
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DocumentError, match="cannot be read"):
        load(path)


def test_bad_sources(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="holds no"):
        load(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    write_lines(tmp_path / "b.jsonl", [{"text": "y"}])
    with pytest.raises(DocumentError, match="mixes json and text files"):
        load(tmp_path)
    (tmp_path / "c.jsonl").write_text('{"text": "fine"}\n{"text": ')
    with pytest.raises(DocumentError, match="cannot be read"):
        load(tmp_path / "c.jsonl")
    for name in (tmp_path / "none", "./none", "none.jsonl", "~/none"):
        with pytest.raises(DocumentError, match="does not exist"):
            load(name)


def test_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    drawn: list[int] = []

    def load_dataset(*names: Any, **options: Any) -> Iterator[dict[str, str]]:
        asked.append((names, options))
        for i in range(1000):
            drawn.append(i)
            yield {"text": f"{i} " * 50}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = DocumentsConfig("org/data-v1.5", "sample", "validation", "abc")
    windows = token_windows(load_documents(config), tiny_pair.tokenizer(), 20, 3)
    assert asked == [
        (("org/data-v1.5", "sample"), {"split": "validation", "revision": "abc", "streaming": True})
    ]
    assert [w.id for w in windows] == ["data-v1.5:0", "data-v1.5:1", "data-v1.5:2"]
    assert drawn == [0, 1, 2]  # no row beyond those that are needed

    def absent(*names: Any, **options: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'org/none' doesn't exist on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", absent)
    with pytest.raises(
        DocumentError, match=r"org/none cannot be read \(Dataset 'org/none' doesn't exist on the Hub\)"
    ):
        load("org/none")


def texts_of(documents: list[Document], length: int, **options: Any) -> list[str]:
    tokenizer = tiny_pair.tokenizer()
    windows = token_windows(documents, tokenizer, length, len(documents), **options)
    assert all(w.ids.shape == (length,) for w in windows)
    return [tokenizer.decode(w.ids) for w in windows]


@pytest.mark.parametrize("words", [60, 400, 20_000])
def test_windows_are_seeded_by_document(words: int) -> None:
    documents = [
        Document(name, " ".join(str(i) for i in range(1000, 1000 + words))) for name in ("a", "b", "c")
    ]
    assert texts_of(documents, 100) == [documents[0].text[:100]] * 3
    drawn = texts_of(documents, 100, window="random", seed=1)
    assert len(set(drawn)) == 3
    assert drawn == texts_of(documents, 100, window="random", seed=1)
    assert drawn[::-1] == texts_of(documents[::-1], 100, window="random", seed=1)  # by name, not by order
    assert drawn != texts_of(documents, 100, window="random", seed=2)
    assert all(text in documents[0].text for text in drawn)


def test_windows_of_scripts_without_spaces() -> None:
    document = Document("long", "文字" * 20_000)
    window = token_windows([document], tiny_pair.tokenizer(), 90, 1, "random", 3)[0]
    assert window.ids.shape == (90,)


def test_wide_tokens_do_not_make_a_document_short() -> None:
    """A tokenizer may make one token of many characters; the slice of a long text is then not enough."""

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [0] * (len(text) // 50)}

    found = token_windows([Document("wide", "x" * 10_000)], tokenizer, 100, 1)
    assert len(found[0].ids) == 100


def test_short_documents_are_counted() -> None:
    documents = [Document("empty", ""), Document("exact", "x" * 10), Document("less", "x" * 9)]
    assert [w.id for w in token_windows(documents, tiny_pair.tokenizer(), 10, 1)] == ["exact"]
    with pytest.raises(
        DocumentError, match=r"2 documents of at least 10 tokens are needed, 1 were found \(2 were"
    ):
        token_windows(documents, tiny_pair.tokenizer(), 10, 2)
    assert token_windows(documents, tiny_pair.tokenizer(), 10, 0) == []
