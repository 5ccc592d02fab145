"""Trains the byte-level BPE that both models of the reference pair share.

Words, single digits and punctuation are split as in Qwen's tokenizers (a digit is always a token of
its own, so that numbers are copied digit by digit); any text survives encode and decode unchanged,
because unknown characters fall back to bytes. Knows nothing about models.

Source of the split pattern: the Qwen2.5/Qwen3 tokenizers; of the algorithm: Sennrich et al. 2016
(arXiv 1508.07909) on bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SPECIALS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<|pad|>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int = 32768
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE and wrap it for transformers.

    Parameters
    ----------
    texts
        Training texts, in a fixed order (the result depends on their counts only).
    vocab_size
        Entries in all, the four special tokens included; at least 260.
    max_length
        Stored as the tokenizer's ``model_max_length``.

    Returns
    -------
    PreTrainedTokenizerFast
        With end-of-text and padding tokens and a chat template; adds no token of its own accord.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def sample(folders: Iterable[Path], characters: Iterable[int], piece: int = 20_000) -> Iterator[str]:
    """Yield pieces from the middle of each document, at most ``characters`` of a folder (one number each)."""
    for folder, left in zip(folders, characters, strict=True):
        for path in sorted(folder.glob("*.txt")):
            text = path.read_text(encoding="utf-8")
            start = max(0, len(text) // 2 - 2 * piece)
            taken = text[start : start + 4 * piece]
            for at in range(0, len(taken), piece):
                yield taken[at : at + piece]
            left -= len(taken)
            if left <= 0:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders of UTF-8 .txt files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--characters", type=int, nargs="+", required=True, help="at most this many of each")
    args = parser.parse_args()
    tokenizer = train_tokenizer(sample(args.folders, args.characters), args.vocab_size)
    tokenizer.save_pretrained(args.out)
    print(f"{len(tokenizer)} entries in {args.out}")


if __name__ == "__main__":
    main()
