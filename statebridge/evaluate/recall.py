"""Recall of made-up facts: training documents and the downstream task, from one seeded generator.

Facts ("The code word of Harold Finch is velvet lantern.") are woven between the sentences of filler
prose and asked for later. Other facts of the same kind stand around the one that is asked for, so
copying the last code word fails: the answer has to be found by name, through attention or through the
recurrent memory. Score: exact match of the greedy continuation,
``hit = all_i argmax p(. | prefix, question, answer_<i) = answer_i``.

Knows tokenizers by three methods (`Encoder`) and nothing about models, caches or states. The setting
follows passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300) and RULER's multi-key needles
(Hsieh et al. 2024, arXiv 2404.06654).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from statebridge.evaluate import recall_words as words

SENTENCE_GAP = re.compile(r"(?<=[.!?])[ ]+(?=[\"'“‘A-Z])")


class Encoder(Protocol):
    """The part of a transformers tokenizer that this module calls."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...


@dataclass(frozen=True)
class Fact:
    """One made-up fact: ``kind`` of ``name`` is ``value``."""

    kind: str
    name: str
    value: str

    def statement(self, rng: np.random.Generator) -> str:
        """Return a sentence that states the fact, in one of the known forms."""
        form = words.STATEMENTS[rng.integers(len(words.STATEMENTS))]
        return form.format(kind=self.kind, name=self.name, value=self.value)

    def question(self, rng: np.random.Generator) -> tuple[str, str]:
        """Return the question and the answering sentence up to, and without, the value."""
        ask, answer = words.QUESTIONS[rng.integers(len(words.QUESTIONS))]
        return ask.format(kind=self.kind, name=self.name), answer.format(kind=self.kind, name=self.name)


@dataclass(frozen=True)
class RecallDocument:
    """A training text and the character spans ``[start, stop)`` of the answers in it."""

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RecallItem:
    """One question about a fact whose statement starts ``depth`` tokens before the end of the prefix."""

    prefix_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    depth: int
    fact: Fact


def _pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def draw_name(rng: np.random.Generator) -> str:
    """Draw a first and a last name."""
    return f"{_pick(rng, words.FIRST_NAMES)} {_pick(rng, words.LAST_NAMES)}"


def draw_value(kind: str, rng: np.random.Generator) -> str:
    """Draw a value of the kind's form: a word pair, a number, a town, a ship or a name."""
    form = words.KINDS[kind]
    if form == "pair":
        return f"{_pick(rng, words.ADJECTIVES)} {_pick(rng, words.NOUNS)}"
    if form == "ship":
        return f"the {_pick(rng, words.ADJECTIVES).title()} {_pick(rng, words.NOUNS).title()}"
    if form == "town":
        return _pick(rng, words.TOWN_STEMS) + _pick(rng, words.TOWN_ENDS)
    if form == "name":
        return draw_name(rng)
    digits = int(form.removeprefix("number"))
    return str(rng.integers(10 ** (digits - 1), 10**digits))


def draw_facts(count: int, rng: np.random.Generator, kinds: int = 3) -> list[Fact]:
    """Draw facts with different (kind, name) and different values, over a few kinds and shared names."""
    chosen = [list(words.KINDS)[i] for i in rng.permutation(len(words.KINDS))[:kinds]]
    names = [draw_name(rng) for _ in range(max(2, (count * 2) // 3))]
    facts: dict[tuple[str, str], Fact] = {}
    values: set[str] = set()
    while len(facts) < count:
        kind = _pick(rng, chosen)
        # Few names and few kinds run out of combinations: fresh names keep the loop finite.
        name = _pick(rng, names) if rng.random() < 0.8 else draw_name(rng)
        value = draw_value(kind, rng)
        if (kind, name) not in facts and value not in values:
            facts[kind, name] = Fact(kind, name, value)
            values.add(value)
    return list(facts.values())


def training_document(
    filler: Sequence[str],
    rng: np.random.Generator,
    characters: int,
    facts: tuple[int, int] = (8, 24),
    chat_share: float = 0.15,
) -> RecallDocument:
    """Weave facts and later questions about them into a piece of filler prose.

    Parameters
    ----------
    filler
        Prose texts; one is drawn, and a piece of it.
    rng
        All randomness comes from here.
    characters
        Length of the filler piece (the facts come on top; shorter fillers are repeated).
    facts
        Smallest and largest number of facts. Each is asked for once or twice, at distances spread evenly
        on a logarithmic scale from the next sentence to the end of the document.
    chat_share
        Share of questions put as chat turns (``<|im_start|>user`` ...).

    Returns
    -------
    RecallDocument
        The text and the character spans of the answers (the values, with the space before them).
    """
    text = filler[int(rng.integers(len(filler)))]
    while len(text) < characters:
        text = text + "\n\n" + text
    start = int(rng.integers(len(text) - characters + 1))
    text = text[start : start + characters]
    gaps = np.array([m.start() for m in SENTENCE_GAP.finditer(text)] or [0, len(text)])
    inserts: list[tuple[int, int, str, tuple[int, int] | None]] = []
    order = 0
    for fact in draw_facts(int(rng.integers(facts[0], facts[1] + 1)), rng):
        # Squaring moves statements towards the front, so that long distances are common.
        at = gaps[int(len(gaps) * rng.random() ** 2)]
        inserts.append((int(at), order, " " + fact.statement(rng), None))
        for _ in range(int(rng.integers(1, 3))):
            distance = (len(text) - at + 1) ** rng.random()
            later = gaps[gaps >= at + distance]
            where = int(later[0]) if len(later) else len(text)
            order += 1
            inserts.append((where, order, *_asked(fact, rng, chat_share)))
        order += 1
    inserts.sort(key=lambda row: row[:2])
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = last = 0
    for where, _, piece, span in inserts:
        pieces += [text[last:where], piece]
        length += where - last
        if span is not None:
            spans.append((length + span[0], length + span[1]))
        length += len(piece)
        last = where
    pieces.append(text[last:])
    return RecallDocument("".join(pieces), tuple(spans))


def _asked(fact: Fact, rng: np.random.Generator, chat_share: float) -> tuple[str, tuple[int, int]]:
    """Return a question with its answer as it stands in a document, and the span of the value in it."""
    ask, answer = fact.question(rng)
    form = rng.random()
    if form < chat_share:
        head, tail = f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n{answer}", ".<|im_end|>\n"
    elif form < 0.6:
        head, tail = f"\n\n{ask} {answer}", ".\n\n"
    else:
        head, tail = f" {ask} {answer}", "."
    return f"{head} {fact.value}{tail}", (len(head), len(head) + 1 + len(fact.value))


@dataclass(frozen=True)
class RecallTask:
    """The downstream task: one question after a prefix of ``length`` tokens, its fact at a given depth.

    Parameters
    ----------
    tokenizer
        Used for filler, statements, questions and answers alike.
    filler
        Prose texts, each long enough for a prefix (longer than ``length`` tokens).
    length
        Tokens of the prefix, L.
    depths
        Tokens before the end of the prefix at which the asked fact's statement starts; at most ``length``.
    items_per_depth, distractors, seed
        Items of each depth; other facts in the prefix, at least half of them of the asked kind; the seed.
    """

    tokenizer: Encoder
    filler: Sequence[str]
    length: int = 4096
    depths: tuple[int, ...] = (64, 256, 1024, 2048, 4000)
    items_per_depth: int = 20
    distractors: int = 7
    seed: int = 0

    def items(self) -> Iterator[RecallItem]:
        """Yield the items, depth by depth; the same seed gives the same items."""
        if max(self.depths) > self.length:
            raise ValueError(f"depth {max(self.depths)} lies outside a prefix of {self.length} tokens")
        for depth in self.depths:
            for index in range(self.items_per_depth):
                yield self._item(depth, np.random.default_rng([self.seed, depth, index]))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _item(self, depth: int, rng: np.random.Generator) -> RecallItem:
        asked, *others = self._facts(rng)
        statement = self._encode(" " + asked.statement(rng))
        told = [self._encode(" " + fact.statement(rng)) for fact in others]
        # As many distractors after the asked fact as fit loosely, so that the last one is not the answer.
        after_budget = depth - len(statement)
        after: list[list[int]] = []
        while (
            told
            and sum(map(len, after)) + len(told[-1]) <= after_budget // 2
            and len(after) < len(others) // 2
        ):
            after.append(told.pop())
        pieces = self._woven(told, self.length - depth, rng) + statement
        pieces += self._woven(after, after_budget, rng)
        if len(pieces) != self.length:
            raise ValueError(f"a statement of {len(statement)} tokens does not fit at depth {depth}")
        ask, answer = asked.question(rng)
        return RecallItem(
            prefix_ids=tuple(pieces),
            prompt_ids=tuple(self._encode(f"\n\n{ask} {answer}")),
            answer_ids=tuple(self._encode(f" {asked.value}")),
            depth=depth,
            fact=asked,
        )

    def _facts(self, rng: np.random.Generator) -> list[Fact]:
        """Draw the asked fact (first) and the distractors: half of its kind, the rest free."""
        while True:
            facts = draw_facts(self.distractors * 3 + 1, rng, kinds=3)
            same = [f for f in facts[1:] if f.kind == facts[0].kind]
            half = (self.distractors + 1) // 2
            if len(same) >= half:
                free = [f for f in facts[1:] if f not in same[:half]]
                chosen = same[:half] + free[: self.distractors - half]
                return [facts[0], *(chosen[i] for i in rng.permutation(len(chosen)))]

    def _woven(self, statements: list[list[int]], budget: int, rng: np.random.Generator) -> list[int]:
        """Return exactly ``budget`` tokens of filler with the statements between its sentences.

        Statements that do not fit are left out, last ones first.
        """
        while sum(map(len, statements)) > budget:
            statements = statements[:-1]
        need = budget - sum(map(len, statements))
        text = self.filler[int(rng.integers(len(self.filler)))]
        start = int(rng.integers(max(1, len(text) - 8 * need - 64)))
        ids = self._encode(text[start : start + 8 * need + 64])
        while len(ids) < need:
            ids = ids + ids
        ids = ids[:need]
        ends = [
            i + 1 for i, token in enumerate(self.tokenizer.convert_ids_to_tokens(ids)) if token[-1:] in ".!?"
        ]
        places = sorted(_pick_place(ends, need, rng) for _ in statements)
        out: list[int] = []
        last = 0
        for place, statement in zip(places, statements, strict=True):
            out += ids[last:place] + statement
            last = place
        return out + ids[last:]


def _pick_place(ends: list[int], need: int, rng: np.random.Generator) -> int:
    return ends[int(rng.integers(len(ends)))] if ends else int(rng.integers(need + 1))


def greedy_match(logits: torch.Tensor, item: RecallItem) -> bool:
    """Tell whether greedy decoding would give the answer, from one teacher-forced pass.

    Parameters
    ----------
    logits
        ``[T, vocabulary]`` for the inputs ``prompt_ids + answer_ids`` after the prefix; T may be longer
        (padding to the right does not matter).
    item
        The item that was asked.

    Returns
    -------
    bool
        True if every answer token is the argmax at its position. While all tokens before it were right,
        greedy decoding sees the same inputs, so this equals exact match of the greedy continuation.
    """
    first = len(item.prompt_ids) - 1
    predicted = logits[first : first + len(item.answer_ids)].argmax(-1)
    return predicted.tolist() == list(item.answer_ids)
