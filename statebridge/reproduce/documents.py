"""The document sets of a run: drawn once, stored as tokens, and never overlapping.

Sets that name the same source are drawn from one stream, one after the other, so that they hold consecutive
documents of it. What was drawn is kept in the run's folder: a resumed run, and every process of it, reads the same
tokens without the network. Knows documents and files, no models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from statebridge.bridge import Document, DocumentsConfig, TokenWindow, load_documents, token_windows
from statebridge.errors import DocumentError, StatebridgeError
from statebridge.reproduce.config import SetRequest
from statebridge.state.atomic import atomic_file

Sets = dict[str, list[TokenWindow]]


def draw(requests: Mapping[str, SetRequest], tokenizer: Any) -> Sets:
    """Documents of every set, as windows of the tokens that are needed.

    Raises
    ------
    DocumentError
        When a source has too few documents that are long enough, or a document is in two sets; names both.
    """
    streams: dict[DocumentsConfig, Iterator[Document]] = {}
    texts: dict[tuple[str, str], str] = {}
    found: Sets = {}
    for name, request in requests.items():
        source = request.documents.source
        stream = streams.setdefault(request.documents, load_documents(request.documents))
        try:
            windows = token_windows(
                _noting(stream, source, texts),
                tokenizer,
                request.length,
                request.skip + request.count,
                request.documents.window,
                request.seed,
            )
        except DocumentError as error:
            raise DocumentError(f"The set {name} from {source}: {error}") from error
        found[name] = windows[request.skip :]
    require_disjoint(found, {name: request.documents.source for name, request in requests.items()}, texts)
    return found


def _noting(stream: Iterator[Document], source: str, texts: dict[tuple[str, str], str]) -> Iterator[Document]:
    """The same documents; sha256 of each text is noted by source and identifier."""
    for document in stream:
        texts[source, document.id] = hashlib.sha256(document.text.encode()).hexdigest()
        yield document


def require_disjoint(sets: Sets, sources: Mapping[str, str], texts: Mapping[tuple[str, str], str]) -> None:
    """Refuse a document that is in two sets or twice in one: by its identifier, its text, or its first tokens.

    Parameters
    ----------
    sets
        Windows of every set.
    sources
        Set -> its source; identifiers name documents of one source.
    texts
        (source, identifier) -> sha256 of the text.

    Raises
    ------
    DocumentError
        Names the document and the sets.
    """
    shortest = min(len(window.ids) for windows in sets.values() for window in windows)
    seen: dict[object, tuple[str, str]] = {}
    for name, windows in sets.items():
        for window in windows:
            document = (sources[name], window.id)
            # a seeded window of the same text may begin elsewhere, and a text may differ in its last line alone
            for key in {document, texts[document], digest(window.ids[:shortest])}:
                if key in seen:
                    other, known = seen[key]
                    where = f"in the sets {other} and {name}" if other != name else f"twice in the set {name}"
                    raise DocumentError(
                        f"The document {window.id!r} is {where}"
                        + (f" (there as {known!r})" if known != window.id else "")
                        + "; take the sets from different folders, or skip the documents of the other."
                    )
                seen[key] = (name, window.id)


def digest(ids: torch.Tensor) -> str:
    """sha256 of token ids."""
    return hashlib.sha256(ids.to(torch.int32).contiguous().numpy().tobytes()).hexdigest()


def store(sets: Sets, folder: Path) -> None:
    """Write every set as one file of tokens [N, T], int32, with identifiers and digests in its header."""
    for name, windows in sets.items():
        header = {
            "documents": json.dumps([window.id for window in windows]),
            "digests": json.dumps([digest(window.ids) for window in windows]),
        }
        ids = torch.stack([window.ids for window in windows]).to(torch.int32)
        with atomic_file(folder / f"{name}.safetensors") as temporary:
            save_file({"ids": ids}, temporary, metadata=header)


def stored(folder: Path, names: Sequence[str]) -> Sets:
    """Read the sets that `store` wrote.

    Raises
    ------
    StatebridgeError
        When a file is damaged.
    """
    found: Sets = {}
    for set_name in names:
        path = folder / f"{set_name}.safetensors"
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                header = file.metadata()
                ids = file.get_tensor("ids").to(torch.int64)
            names, digests = json.loads(header["documents"]), json.loads(header["digests"])
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise StatebridgeError(
                f"{path} is damaged ({error}); delete the run's folder of documents."
            ) from error
        if [digest(row) for row in ids] != digests:
            raise StatebridgeError(f"The tokens in {path} are not those that were drawn; start a new run.")
        found[set_name] = [TokenWindow(name, row) for name, row in zip(names, ids, strict=True)]
    return found
