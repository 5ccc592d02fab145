"""The recall generator: what it states, asks and marks, and what counts as a hit."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from statebridge.evaluate import recall_words as words
from statebridge.evaluate.recall import (
    RecallItem,
    RecallTask,
    draw_facts,
    greedy_match,
    training_document,
)

FILLER = sorted(pydoc_data.topics.topics.values(), key=len)[-4:]


class Characters:
    """A tokenizer of one token a character: decoding is trivial, positions are exact."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return ([0] if add_special_tokens else []) + [ord(c) for c in text]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(i) for i in ids]


def decode(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


def task(**changes: object) -> RecallTask:
    settings: dict[str, object] = {"length": 2000, "depths": (150, 900, 1990), "items_per_depth": 6}
    return RecallTask(Characters(), FILLER, **(settings | changes))  # type: ignore[arg-type]


def items() -> Iterator[RecallItem]:
    return task().items()


def test_the_statement_starts_at_its_depth() -> None:
    for item in items():
        assert len(item.prefix_ids) == 2000
        statement = decode(item.prefix_ids)[2000 - item.depth :]
        head = statement[: statement.index(".") + 1]
        assert head.startswith(" ")
        for part in (item.fact.name, item.fact.kind, item.fact.value):
            assert part in head


def test_the_prompt_asks_for_the_fact_and_leaves_the_answer_open() -> None:
    for item in items():
        prompt, answer = decode(item.prompt_ids), decode(item.answer_ids)
        assert item.fact.name in prompt
        assert item.fact.kind in prompt
        assert item.fact.value not in prompt
        assert answer == f" {item.fact.value}"


def test_copying_the_last_fact_of_the_kind_fails() -> None:
    """Other facts of the asked kind are there; where the depth leaves room, one of them comes later."""
    for item in task(length=4000, depths=(3000,), items_per_depth=10).items():
        text = decode(item.prefix_ids)
        assert text.count(item.fact.value) == 1
        after = text[text.index(item.fact.value) :]
        assert any(form.split("{")[0].strip()[:12] in after for form in words.STATEMENTS if form[0] != "{")
        assert text.count(item.fact.kind) >= 4


def test_the_same_seed_gives_the_same_items_and_another_other_ones() -> None:
    assert list(items()) == list(items())
    assert list(task(seed=1).items()) != list(items())
    # A depth's items do not depend on which other depths are asked for.
    assert list(task(depths=(900,)).items()) == [item for item in items() if item.depth == 900]


def test_a_depth_outside_the_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="outside a prefix of 2000 tokens"):
        list(task(depths=(2001,)).items())


def test_facts_never_contradict_each_other() -> None:
    facts = draw_facts(40, np.random.default_rng(3))
    assert len({(f.kind, f.name) for f in facts}) == len({f.value for f in facts}) == 40


def test_training_documents_mark_values_that_were_stated_before() -> None:
    for seed in range(8):
        document = training_document(FILLER, np.random.default_rng(seed), 12_000)
        assert 8 <= len(document.answers) <= 48
        assert list(document.answers) == sorted(document.answers)
        for start, stop in document.answers:
            value = document.text[start:stop]
            assert value[0] == " "
            assert value[-1].isalnum()
            assert value in document.text[:start], "asked before it was told"
            assert document.text[stop] == "."


def test_training_documents_ask_over_all_distances_and_follow_the_seed() -> None:
    distances = []
    for seed in range(8):
        document = training_document(FILLER, np.random.default_rng(seed), 12_000)
        distances += [a - document.text.index(document.text[a:b]) for a, b in document.answers]
    assert min(distances) < 500
    assert max(distances) > 8000
    first, again, other = (training_document(FILLER, np.random.default_rng(s), 5000) for s in (1, 1, 2))
    assert first == again != other


def test_a_hit_needs_every_answer_token_at_its_place() -> None:
    item = next(items())
    ids = [*item.prompt_ids, *item.answer_ids]
    logits = torch.zeros(len(ids) + 3, 200)
    for place, token in enumerate(ids[1:]):
        logits[place, token] = 1.0
    assert greedy_match(logits, item)
    last = len(ids) - 2  # predicts the last answer token
    logits[last] = 0.0
    assert not greedy_match(logits, item)
    logits[last - 1, ids[-1]] = 2.0
    assert not greedy_match(logits, item)
