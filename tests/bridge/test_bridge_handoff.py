"""The hand-over: every kind of prompt and state, generate's options, what it reports and what it refuses."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_pair
import torch
from tiny_pair import ids_of
from transformers import AutoModelForCausalLM, GenerationConfig, TextIteratorStreamer

import statebridge
from statebridge.bridge import Bridge, ModelPair
from statebridge.errors import CaptureError, DocumentError, StateMismatch

PROMPT = "The source reads this sentence, and the receiver goes on with the next. " * 2
PAIR = tiny_pair.pair()


def by_hand(bridge: Bridge, ids: torch.Tensor, bridge_tokens: int, count: int) -> list[int]:
    """Greedy continuation, one token at a time."""
    state = bridge(statebridge.prefill(PAIR.source, ids[:, :-bridge_tokens]).state())
    live = statebridge.continue_from(PAIR.receiver, state, ids[:, -bridge_tokens:])
    new: list[int] = []
    for _ in range(count):
        new.append(int(live.logits[0, -1].argmax()))
        live = statebridge.continue_from(PAIR.receiver, live, torch.tensor([[new[-1]]]))
    return new


@pytest.mark.parametrize("bridge_tokens", [1, 16, 64])
def test_equals_continuing_by_hand(fitted: Bridge, bridge_tokens: int) -> None:
    reply = PAIR.handoff(
        PROMPT,
        bridge=fitted,
        bridge_tokens=bridge_tokens,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    ids = ids_of(PROMPT)
    assert reply.new_ids[0].tolist() == by_hand(fitted, ids, bridge_tokens, 12)
    assert (reply.prefix_tokens, reply.bridge_tokens) == (ids.shape[1] - bridge_tokens, bridge_tokens)
    assert reply.prefix_tokens_processed == 0
    assert reply.text == PAIR.tokenizer.decode(reply.new_ids[0], skip_special_tokens=True)
    assert reply.plan == "TTT"
    spec = PAIR.receiver_identity.layers
    assert reply.moved_bytes == {
        "K": 2 * 2 * 16 * 4 * reply.prefix_tokens,
        "R": 3 * 4 * 12 * 8 * 4,
        "C": 3 * spec[0].conv_state[0] * 4 * 4,
    }


def test_the_receiver_embeds_the_bridge_tokens_and_no_other(fitted: Bridge) -> None:
    read: list[list[int]] = []
    embedding = PAIR.receiver.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, args, output: read.append(args[0][0].tolist()))
    try:
        reply = PAIR.handoff(PROMPT, bridge=fitted, bridge_tokens=3, max_new_tokens=4, do_sample=False)
    finally:
        hook.remove()
    assert read == [ids_of(PROMPT)[0, -3:].tolist(), *([[token] for token in reply.new_ids[0, :-1].tolist()])]


def test_the_state_matters(fitted: Bridge) -> None:
    """A wrong donor gives other logits at the first position."""
    ids, other = ids_of(PROMPT), ids_of(PROMPT[::-1])
    logits = [
        statebridge.continue_from(
            PAIR.receiver, fitted(statebridge.prefill(PAIR.source, prefix).state()), ids[:, -1:]
        ).logits
        for prefix in (ids[:, :-1], other[:, :-1])
    ]
    assert (logits[0] - logits[1]).abs().max() > 0.1


def test_every_kind_of_prompt(fitted: Bridge) -> None:
    options = {"bridge": fitted, "max_new_tokens": 6, "do_sample": False}
    text = PAIR.handoff(PROMPT, **options)
    for ids in (ids_of(PROMPT), ids_of(PROMPT)[0], ids_of(PROMPT).int()):
        assert torch.equal(PAIR.handoff(ids, **options).new_ids, text.new_ids)
    chat = [{"role": "user", "content": "Say something."}]
    written = "<user>Say something.\n<assistant>"
    assert torch.equal(PAIR.handoff(chat, **options).new_ids, PAIR.handoff(written, **options).new_ids)
    bare = ModelPair(PAIR.source, PAIR.receiver, _without_template())
    with pytest.raises(DocumentError, match="no chat template"):
        bare.handoff(chat, **options)


def _without_template() -> Any:
    tokenizer = copy.deepcopy(tiny_pair.tokenizer())
    tokenizer.chat_template = None
    return tokenizer


def test_states_of_earlier_turns(fitted: Bridge) -> None:
    ids = ids_of(PROMPT)
    options = {"bridge": fitted, "max_new_tokens": 5, "do_sample": False}
    live = statebridge.prefill(PAIR.source, ids[:, :50])
    expected = PAIR.handoff(ids, bridge_tokens=ids.shape[1] - 50, **options)
    for state in (live, live.state()):
        reply = PAIR.handoff(ids, state=state, **options)
        assert torch.equal(reply.new_ids, expected.new_ids)
        assert (reply.prefix_tokens, reply.bridge_tokens) == (50, ids.shape[1] - 50)
        assert reply.seconds["source_prefill"] == 0
    # the source generates, the user says more, the receiver takes over
    said = statebridge.generate_from(
        PAIR.source, live.state(), ids[:, 50:], max_new_tokens=7, do_sample=False, eos_token_id=None
    )
    more = torch.cat((said.output.sequences, ids_of("And then?")), dim=1)
    reply = PAIR.handoff(more, state=said, **options)
    assert reply.prefix_tokens == ids.shape[1] + 6  # the last generated token was never read
    assert reply.bridge_tokens == 1 + len("And then?")
    assert reply.prefix_tokens_processed == 0
    source = statebridge.continue_from(PAIR.source, live, torch.cat((ids[:, 50:], said.new_ids[:, :-1]), 1))
    state = fitted(source.state())
    first = (
        statebridge.continue_from(PAIR.receiver, state, more[:, reply.prefix_tokens :]).logits[0, -1].argmax()
    )
    assert reply.new_ids[0, 0] == first


def test_states_that_do_not_fit_the_prompt(fitted: Bridge) -> None:
    ids = ids_of(PROMPT)
    state = statebridge.prefill(PAIR.source, ids[:, :50]).state()
    wrong = ids.clone()
    wrong[0, 20] = 5
    for prompt in (wrong, ids[:, :50], ids[:, :20]):
        with pytest.raises(
            DocumentError, match=r"must begin with the 50 tokens of the state .* agrees with the first"
        ):
            PAIR.handoff(prompt, bridge=fitted, state=state)
    two = statebridge.prefill(PAIR.source, ids[:, :50].repeat(2, 1)).state()
    with pytest.raises(StateMismatch, match=r"rows: expected 1, found 2.*state\.select"):
        PAIR.handoff(ids, bridge=fitted, state=two)
    beams = statebridge.generate_from(PAIR.source, state, ids[:, 50:], max_new_tokens=4, num_beams=2)
    with pytest.raises(CaptureError, match="beam"):
        PAIR.handoff(torch.cat((ids, ids), 1), bridge=fitted, state=beams)
    foreign = statebridge.prefill(PAIR.receiver, ids[:, :50]).state()
    with pytest.raises(StateMismatch, match="does not translate states of this model"):
        PAIR.handoff(ids, bridge=fitted, state=foreign)


def test_prompts_that_are_too_short(fitted: Bridge) -> None:
    for prompt, tokens in (("", 1), ("a", 1), ("abc", 3)):
        with pytest.raises(
            DocumentError, match=f"has {len(prompt)} tokens; it needs more than the {tokens} bridge"
        ):
            PAIR.handoff(prompt, bridge=fitted, bridge_tokens=tokens)
    with pytest.raises(DocumentError, match="at least one bridge token"):
        PAIR.handoff("abc", bridge=fitted, bridge_tokens=0)
    with pytest.raises(DocumentError, match="one prompt, found 2 rows"):
        PAIR.handoff(tiny.ids(2, 9), bridge=fitted)
    with pytest.raises(StateMismatch, match="another receiver"):
        ModelPair(PAIR.source, PAIR.source, PAIR.tokenizer).handoff("abc", bridge=fitted)


def test_options_of_generate(fitted: Bridge) -> None:
    greedy = {"bridge": fitted, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    base = PAIR.handoff(PROMPT, **greedy)
    letters = [PAIR.tokenizer.decode(token) for token in base.new_ids[0]]
    stop = next(letter for letter in letters if letter.isascii())  # others are parts of characters
    stopped = PAIR.handoff(PROMPT, stop_strings=[stop], **greedy)
    assert stopped.new_ids.shape[1] == letters.index(stop) + 1 < 12
    by_config = GenerationConfig(stop_strings=[stop], max_new_tokens=12, do_sample=False)
    assert torch.equal(
        PAIR.handoff(PROMPT, bridge=fitted, generation_config=by_config).new_ids, stopped.new_ids
    )
    config = GenerationConfig(max_new_tokens=3, do_sample=False)
    assert PAIR.handoff(PROMPT, bridge=fitted, generation_config=config).new_ids.shape[1] == 3
    seen: list[int] = []

    def ban(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids.shape[1])
        scores[:, base.new_ids[0, 0]] = -torch.inf
        return scores

    banned = PAIR.handoff(PROMPT, logits_processor=[ban], **greedy)
    assert base.new_ids[0, 0] not in banned.new_ids
    assert seen[0] == ids_of(PROMPT).shape[1]  # processors see the prefix
    several = PAIR.handoff(PROMPT, num_beams=3, num_return_sequences=2, **greedy)
    assert several.new_ids.shape == (2, 12)
    assert several.prefix_tokens_processed == 0
    plain = PAIR.handoff(PROMPT, return_dict_in_generate=False, **greedy)
    assert torch.equal(plain.output[:, -12:], base.new_ids)
    assert PAIR.handoff(PROMPT, output_scores=True, **greedy).output.scores[0].shape == (1, 260)


def test_sampling_is_seeded(fitted: Bridge) -> None:
    replies = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        replies.append(
            PAIR.handoff(PROMPT, bridge=fitted, max_new_tokens=12, do_sample=True, temperature=1.5).text
        )
    assert replies[0] == replies[1] != replies[2]


def test_streaming(fitted: Bridge) -> None:
    streamer = TextIteratorStreamer(PAIR.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    replies: list[Any] = []
    options = {"max_new_tokens": 9, "do_sample": False, "streamer": streamer}
    thread = threading.Thread(target=lambda: replies.append(PAIR.handoff(PROMPT, bridge=fitted, **options)))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == replies[0].text


def test_timings_add_up(fitted: Bridge) -> None:
    seconds = PAIR.handoff(
        PROMPT, bridge=fitted, max_new_tokens=20, do_sample=False, eos_token_id=None
    ).seconds
    assert set(seconds) == {"source_prefill", "capture", "translate", "first_token", "generate"}
    assert all(0 < value < 60 for value in seconds.values())
    assert seconds["first_token"] < seconds["generate"]


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_models_of_different_dtypes(fitted: Bridge, tmp_path: Path, dtypes: tuple[str, str]) -> None:
    """A checkpoint keeps its identity across dtypes; K and C are cast on the way in, R stays float32."""
    models = []
    for name, model, dtype in zip(("source", "receiver"), (PAIR.source, PAIR.receiver), dtypes, strict=True):
        model.save_pretrained(tmp_path / name)
        # not .to(dtype), which would round the rotary frequencies as well
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype).eval())
    reply = ModelPair(*models, PAIR.tokenizer).handoff(
        PROMPT, bridge=fitted, max_new_tokens=4, do_sample=False
    )
    assert reply.prefix_tokens_processed == 0
    layers = reply.output.get("cache", reply.output.get("past_key_values")).layers
    assert layers[3].keys.dtype == models[1].dtype == getattr(torch, dtypes[1])
    assert layers[0].recurrent_states[0].dtype == torch.float32


@pytest.mark.parametrize("plan", ["DDD", "TTT"])
def test_a_handed_over_source_goes_on_as_if_it_had_kept_everything(fitted: Bridge, plan: str) -> None:
    """The bridge reads the source's cache where it lies: bit-exact afterwards, also for a state that was given."""
    ids = ids_of(PROMPT)
    live = statebridge.prefill(PAIR.source, ids[:, :-4])
    state = live.state()
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    replies = [
        PAIR.handoff(ids, bridge=fitted.with_plan(plan), state=given, **options) for given in (live, state)
    ]
    assert replies[0].text == replies[1].text
    expected = statebridge.continue_from(
        PAIR.source, statebridge.prefill(PAIR.source, ids[:, :-4]), ids[:, -4:]
    )
    assert torch.equal(statebridge.continue_from(PAIR.source, state, ids[:, -4:]).logits, expected.logits)
    assert torch.equal(statebridge.continue_from(PAIR.source, live, ids[:, -4:]).logits, expected.logits)
