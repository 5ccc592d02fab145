"""A session that comes back in another process, disturbed on purpose, goes on as if it had never left: bit-exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tiny
import torch

from statebridge.capture import continue_from, generate_from, prefill
from statebridge.sessions import HybridSession, SessionStore

FAMILIES = ("qwen3_5", "lfm2")


def onward(model, session: HybridSession, generator: torch.Generator) -> dict[str, object]:
    """What a session does next: greedy, sampled from the default generator, noise of its own, and logits."""
    state, pending = session.state, session.pending
    greedy = generate_from(model, state, pending, max_new_tokens=8, do_sample=False)
    sampled = generate_from(model, state, pending, max_new_tokens=8, do_sample=True, temperature=3.0, top_k=0)
    logits = continue_from(model, sampled.state(), sampled.new_ids[:, -1:]).logits
    return {
        "greedy": greedy.new_ids.tolist(),
        "sampled": sampled.new_ids.tolist(),
        "logits": logits.view(torch.int32).flatten().tolist(),
        "noise": torch.rand(3, generator=generator).tolist(),
        "clocks": session.clocks,
        "threads": torch.get_num_threads(),
    }


CHILD = """
    import json, os, random, sys
    for folder in sys.argv[2].split(":"):
        sys.path.insert(0, folder)
    import numpy, tiny, torch
    from test_resume import FAMILIES, onward
    from statebridge.sessions import HybridSession, SessionStore
    store = SessionStore(sys.argv[1])
    results = {}
    for checkpoint in store.list():
        model = tiny.build(checkpoint.label)
        # leftovers of other sessions, everywhere where a session could lean on them
        torch.manual_seed(123)
        random.seed(123)
        numpy.random.seed(123)
        torch.set_num_threads(3)
        model.model.rope_deltas = torch.tensor([[17]])
        model.rope_deltas = torch.tensor([[17]])
        noise = torch.Generator().manual_seed(99)
        session = HybridSession(generators={"noise": noise})
        session.load(store.restore(checkpoint.id))
        results[checkpoint.label] = onward(model, session, noise)
    print(json.dumps(results))
"""


@pytest.mark.slow
def test_a_session_goes_on_in_another_process(tmp_path) -> None:
    store = SessionStore(tmp_path / "store", segment=8)
    expected = {}
    for family in FAMILIES:
        model = tiny.build(family)
        torch.manual_seed(7)
        torch.rand(3)
        noise = torch.Generator().manual_seed(5)
        ids = tiny.ids(2, 30)
        session = HybridSession(
            prefill(model, ids[:, :-1]).state(), ids[:, -1:], {"noise": noise}, {"turn": 4}
        )
        store.checkpoint(session, label=family)
        expected[family] = onward(model, session, noise)
    here = Path(__file__).parent
    folders = f"{here.parent}:{here}"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(store.path), folders],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for family in FAMILIES:
        for what, value in expected[family].items():
            assert found[family][what] == value, (family, what)
        assert expected[family]["sampled"] != expected[family]["greedy"]
