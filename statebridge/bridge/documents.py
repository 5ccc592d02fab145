"""Documents for fitting and judging: through the `datasets` library, from files or streamed from the hub.

A document is an identifier and a text; what the models read is a window of its tokens. Documents that are too
short are skipped and counted, and too few documents are an error that says so before anything runs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from statebridge.bridge.config import DocumentsConfig
from statebridge.errors import DocumentError

_BUILDERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_CHARACTERS_PER_TOKEN = 16  # more than any byte-level BPE makes of prose, so that a slice is long enough


@dataclass(frozen=True)
class Document:
    """One document: an identifier that names it in every result, and its text."""

    id: str
    text: str


@dataclass(frozen=True)
class TokenWindow:
    """Tokens [T] of one document, with the identifier of the document."""

    id: str
    ids: torch.Tensor


def load_documents(config: DocumentsConfig) -> Iterator[Document]:
    """Yield documents in the order of their source.

    Raises
    ------
    DocumentError
        When the source does not exist, has no such column or cannot be read.
    """
    import datasets

    path = Path(config.source)
    try:
        if path.exists():
            files = _files(path)
            builder = _BUILDERS[files[0].suffix.lower()]
            if builder == "text":
                # one document per file; `datasets` would name none of them
                yield from (Document(f.name, f.read_text(encoding="utf-8", errors="replace")) for f in files)
                return
            rows = datasets.load_dataset(
                builder, data_files=[str(f) for f in files], split="train", streaming=True
            )
        elif path.suffix or config.source.startswith((".", "/")):
            raise DocumentError(f"{config.source} does not exist.")
        else:
            rows = datasets.load_dataset(
                config.source, config.name, split=config.split, revision=config.revision, streaming=True
            )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DocumentError(f"The documents of {config.source} cannot be read ({error}).") from error
    yield from _rows(rows, config)


def token_windows(
    documents: Iterable[Document],
    tokenizer: Any,
    length: int,
    count: int,
    window: str = "start",
    seed: int = 0,
) -> list[TokenWindow]:
    """The first `count` documents that have `length` tokens, as windows of exactly `length` tokens.

    Parameters
    ----------
    documents
        Documents in order.
    tokenizer
        A transformers tokenizer; no special tokens are added.
    length, count
        Tokens per window and number of windows.
    window, seed
        "start", or "random" for a window that depends on the seed and the document's identifier.

    Raises
    ------
    DocumentError
        When fewer than `count` documents are long enough, with the numbers found.
    """
    found: list[TokenWindow] = []
    short = 0
    for document in documents:
        if len(found) == count:
            break
        ids = tokenizer(
            _slice(document, length, window, seed), add_special_tokens=False, return_attention_mask=False
        )["input_ids"]
        if len(ids) < length:
            short += 1
            continue
        found.append(TokenWindow(document.id, torch.tensor(ids[:length], dtype=torch.int64)))
    if len(found) < count:
        raise DocumentError(
            f"{count} documents of at least {length} tokens are needed, {len(found)} were found "
            f"({short} were shorter); give more documents or ask for fewer or shorter ones."
        )
    return found


def _slice(document: Document, length: int, window: str, seed: int) -> str:
    need = length * _CHARACTERS_PER_TOKEN
    if window == "start" or len(document.text) <= need:
        return document.text[:need]
    draw = random.Random(hashlib.sha256(f"{seed}:{document.id}".encode()).digest())
    start = draw.randrange(len(document.text) - need)
    # begin after a space, so that the first token is not the rest of a word
    return document.text[start : start + need].partition(" ")[2]


def _files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix.lower() in _BUILDERS)
    if not files or files[0].suffix.lower() not in _BUILDERS:
        raise DocumentError(f"{path} holds no {', '.join(_BUILDERS)} file.")
    kinds = {_BUILDERS[f.suffix.lower()] for f in files}
    if len(kinds) > 1:
        raise DocumentError(f"{path} mixes {' and '.join(sorted(kinds))} files; keep one kind in a folder.")
    return files


def _rows(rows: Iterable[dict[str, Any]], config: DocumentsConfig) -> Iterator[Document]:
    for number, row in enumerate(rows):
        for column in (config.text_field, config.id_field):
            if column is not None and column not in row:
                raise DocumentError(
                    f"{config.source} has no column {column!r}; its columns are {', '.join(row)}."
                )
        name = row[config.id_field] if config.id_field else f"{Path(config.source).name}:{number}"
        yield Document(str(name), str(row[config.text_field]))
