"""Text to token arrays, and which sequences make up which training step.

Three arrays leave this module, as .npy files: the token stream (uint16, documents in sorted order, an
end-of-text token after each), and per sequence length the recall documents (uint16 ``[N, length]``) with
their answer mask (uint8). `visits` is a pure function of the step: nothing has to be saved to resume.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from statebridge.evaluate.recall import training_document

# Documents whose name hashes below this share are kept out of training, where a folder asks for it.
HELD_OUT_SHARE = 0.05


def held_out(path: Path) -> bool:
    """Tell whether a file of a folder that is split by name belongs to validation (about 5 %)."""
    return int(hashlib.sha256(path.name.encode()).hexdigest()[:8], 16) < HELD_OUT_SHARE * 2**32


_TOKENIZER = None


def _start(folder: str) -> None:
    global _TOKENIZER
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _TOKENIZER = AutoTokenizer.from_pretrained(folder)


def _tokens(path: Path) -> np.ndarray:
    text = path.read_text(encoding="utf-8")
    ids = _TOKENIZER(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.array([*ids, _TOKENIZER.eos_token_id], dtype=np.uint16)


def _recall(job: tuple[list[Path], int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Make ``count`` recall documents of ``length`` tokens from a few filler files."""
    paths, length, count, seed, part = job
    rng = np.random.default_rng([seed, length, part])
    filler = [path.read_text(encoding="utf-8") for path in paths]
    ids = np.zeros((count, length), dtype=np.uint16)
    mask = np.zeros((count, length), dtype=np.uint8)
    facts = (max(2, min(8, length // 128)), max(2, min(24, length // 64)))
    sample = "".join(text[:20_000] for text in filler)
    characters = length * len(sample) / len(_TOKENIZER.encode(sample, add_special_tokens=False))
    for row in range(count):
        # Facts and questions come on top of the filler; what is longer than a sequence is cut off.
        for stretch in (0.75, 0.9, 1.1, 1.5, 3.0):
            document = training_document(filler, rng, int(characters * stretch), facts)
            coded = _TOKENIZER(
                document.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            if len(coded["input_ids"]) >= length:
                break
        else:
            raise ValueError(f"no recall document of {length} tokens came out of {paths[0].name}")
        ids[row] = coded["input_ids"][:length]
        starts = np.array([at for at, _ in coded["offset_mapping"][:length]])
        for first, last in document.answers:
            mask[row, np.searchsorted(starts, first) : np.searchsorted(starts, last)] = 1
    return ids, mask


def prepare(
    folders: list[Path],
    split: set[str],
    tokenizer: Path,
    out: Path,
    recall: dict[int, int],
    seed: int,
    workers: int,
) -> dict[str, object]:
    """Write ``tokens.npy``, ``recall_<length>.npy`` and ``answers_<length>.npy``, and return the digests.

    Parameters
    ----------
    folders
        Folders of UTF-8 .txt files; their order is the order in the stream.
    split
        Names of folders of which `held_out` files are left out.
    tokenizer, out
        Folder of the tokenizer; folder to write to.
    recall
        Sequence length -> number of recall documents.
    seed, workers
        Seed of the recall documents; processes. The arrays do not depend on ``workers``.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [p for f in folders for p in sorted(f.glob("*.txt")) if f.name not in split or not held_out(p)]
    if not files:
        raise ValueError(f"no .txt files in {[str(f) for f in folders]}")
    arrays: dict[str, np.ndarray] = {}
    # Spawned, because forking a process whose tokenizer has run threads can leave the child waiting for ever.
    with get_context("spawn").Pool(workers, _start, (str(tokenizer),)) as pool:
        arrays["tokens"] = np.concatenate(pool.map(_tokens, files, chunksize=1))
        long_files = [p for p in files if p.stat().st_size > 60_000] or files
        for length, count in recall.items():
            per_job = max(1, min(64, count // 4))
            jobs = []
            for part, at in enumerate(range(0, count, per_job)):
                rng = np.random.default_rng([seed, length, part, 1])
                paths = [long_files[int(i)] for i in rng.integers(len(long_files), size=8)]
                jobs.append((paths, length, min(per_job, count - at), seed, part))
            made = pool.map(_recall, jobs, chunksize=1)
            arrays[f"recall_{length}"] = np.concatenate([ids for ids, _ in made])
            arrays[f"answers_{length}"] = np.concatenate([mask for _, mask in made])
    digests: dict[str, object] = {"files": len(files), "seed": seed}
    for name, array in arrays.items():
        np.save(out / f"{name}.npy", array)
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        digests[name] = {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest}
    (out / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
    return digests


def visits(items: int, seed: int, salt: int, first: int, count: int) -> list[tuple[int, int]]:
    """Return (epoch, item) of visits ``first .. first + count - 1``: each epoch has its own order.

    ``salt`` separates phases and arrays of one seed.
    """
    out = []
    for index in range(first, first + count):
        epoch, place = divmod(index, items)
        out.append((epoch, int(_order(seed, salt, epoch, items)[place])))
    return out


@lru_cache(maxsize=8)
def _order(seed: int, salt: int, epoch: int, items: int) -> np.ndarray:
    return np.random.default_rng([seed, salt, epoch]).permutation(items)


def window_starts(total: int, length: int, seed: int, salt: int, first: int, count: int) -> np.ndarray:
    """Return where the windows of those visits start in a stream of ``total`` tokens.

    Windows of an epoch do not overlap; each epoch cuts the stream at another offset.
    """
    windows = total // length - 1
    if windows < 1:
        raise ValueError(f"{total} tokens are too few for windows of {length}")
    at = visits(windows, seed, salt, first, count)
    shifts = {e: int(np.random.default_rng([seed, salt, e, 1]).integers(length)) for e, _ in at}
    return np.array([shifts[epoch] + item * length for epoch, item in at], dtype=np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders of UTF-8 .txt files")
    parser.add_argument("--split", nargs="*", default=[], help="folder names of which 5 %% is held out")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recall", nargs="+", default=["4224:12000", "16640:800"], metavar="LENGTH:COUNT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    recall = {int(length): int(count) for length, count in (item.split(":") for item in args.recall)}
    digests = prepare(
        args.folders, set(args.split), args.tokenizer, args.out, recall, args.seed, args.workers
    )
    print(json.dumps(digests, indent=1))


if __name__ == "__main__":
    main()
