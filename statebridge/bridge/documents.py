"""Documents for fitting and judging: through the `datasets` library, from files or streamed from the hub.

A document is an identifier and a text; what the models read is a window of its tokens. Documents that are too
short are skipped and counted, and too few documents are an error that says so before anything runs.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from statebridge.bridge.config import DocumentsConfig
from statebridge.errors import DocumentError

_BUILDERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_CHARACTERS_PER_TOKEN = 16  # more than a byte-level BPE makes of prose
#: Source of documents that needs no file and no network: prose that comes with Python, in endless pieces of as many
#: characters as stand after a colon ("installed:20000").
INSTALLED = "installed"


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

    kind, _, characters = config.source.partition(":")
    if kind == INSTALLED:
        if not (characters or "1").isdecimal():
            raise DocumentError(f"{config.source} is no number of characters; write, say, {INSTALLED}:20000.")
        yield from _installed(int(characters or 16_384))
        return
    path = Path(config.source)
    options: dict[str, Any] = {"split": "train", "streaming": True}
    try:
        if path.exists():
            files = _files(path)
            builder = _BUILDERS[files[0].suffix.lower()]
            if builder == "text":
                # one document per file; `datasets` would name none of them
                for file in files:
                    yield Document(file.name, file.read_text(encoding="utf-8-sig", errors="replace"))
                return
            rows = datasets.load_dataset(builder, data_files=[str(file) for file in files], **options)
        elif path.suffix.lower() in _BUILDERS or config.source.startswith((".", "/", "~")):
            raise DocumentError(
                f"{config.source} does not exist; give a file, a folder or a dataset of the hub."
            )
        else:
            options |= {"split": config.split, "revision": config.revision}
            rows = datasets.load_dataset(config.source, config.name, **options)
        yield from _rows(rows, config)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise DocumentError(f"The documents of {config.source} cannot be read ({reason}).") from error


def token_windows(
    documents: Iterable[Document | TokenWindow],
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
        Documents in order, no more of which are taken than are needed; a window that was cut already gives its
        first tokens.
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
    # count first, so that no document is read beyond the last that is needed
    for document in documents if count else ():
        cut = _cut(document, tokenizer, length, window, seed)
        if cut is None:
            short += 1
            continue
        found.append(cut)
        if len(found) == count:
            break
    if len(found) < count:
        raise DocumentError(
            f"{count} documents of at least {length} tokens are needed, {len(found)} were found "
            f"({short} were shorter); give more documents or ask for fewer or shorter ones."
        )
    return found


def _cut(
    document: Document | TokenWindow, tokenizer: Any, length: int, window: str, seed: int
) -> TokenWindow | None:
    if isinstance(document, TokenWindow):
        return TokenWindow(document.id, document.ids[:length]) if len(document.ids) >= length else None
    ids = _window(document, tokenizer, length, window, seed)
    return None if ids is None else TokenWindow(document.id, torch.tensor(ids, dtype=torch.int64))


def _window(document: Document, tokenizer: Any, length: int, window: str, seed: int) -> list[int] | None:
    """Exactly `length` tokens of a document; None when it is too short."""
    text, need = document.text, length * _CHARACTERS_PER_TOKEN
    draw = random.Random(hashlib.sha256(f"{seed}:{document.id}".encode()).digest())
    if len(text) > 4 * need:  # a book: do not tokenize all of it
        start = draw.randrange(len(text) - need) if window == "random" else 0
        part = text[start : start + need]
        # begin after a space, where there is one, so that the first token is not the rest of a word
        ids = _tokens(tokenizer, part[part.find(" ", 0, need // 2) + 1 :] if start else part)
        if len(ids) >= length:
            return ids[:length]
    ids = _tokens(tokenizer, text)
    if len(ids) < length:
        return None
    start = draw.randrange(len(ids) - length + 1) if window == "random" else 0
    return ids[start : start + length]


def _tokens(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: a document longer than the model's context is no mistake here
    ids: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
    return ids


def _installed(characters: int) -> Iterator[Document]:
    """Consecutive pieces of the prose; when it ends, it begins again with its paragraphs in another order."""
    from pydoc_data.topics import topics

    paragraphs = [part for name in sorted(topics) for part in topics[name].split("\n\n")]
    for number in itertools.count():
        order = list(paragraphs)
        if number:
            random.Random(number).shuffle(order)
        text = "\n\n".join(order)
        for start in range(0, len(text) - characters + 1, characters):
            yield Document(f"{INSTALLED}:{number}:{start}", text[start : start + characters])


def _files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if not f.name.startswith("."))
    files = [file for file in files if file.suffix.lower() in _BUILDERS]
    if not files:
        raise DocumentError(f"{path} holds no {', '.join(_BUILDERS)} file; give a file or folder that does.")
    kinds = sorted({_BUILDERS[file.suffix.lower()] for file in files})
    if len(kinds) > 1:
        raise DocumentError(f"{path} mixes {' and '.join(kinds)} files; keep one kind in a folder.")
    return files


def _rows(rows: Iterable[dict[str, Any]], config: DocumentsConfig) -> Iterator[Document]:
    for number, row in enumerate(rows):
        for column in (config.text_field, config.id_field):
            if column is not None and column not in row:
                raise DocumentError(
                    f"{config.source} has no column {column!r}; its columns are {', '.join(row)}: set "
                    "documents.text_field or documents.id_field."
                )
        name = row[config.id_field] if config.id_field else f"{Path(config.source).name}:{number}"
        yield Document(str(name), str(row[config.text_field] or ""))
