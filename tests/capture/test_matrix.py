"""The support matrix: true of tiny models, and up to date where it is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny

from statebridge.capture import FAMILIES, identity_of
from statebridge.capture.matrix import support_matrix
from statebridge.capture.model import profile, text_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", tiny.available())
def test_rows_are_what_tiny_models_keep(family: str) -> None:
    model = tiny.build(family)
    name, rule = model.config.model_type, profile(model).rule
    layers = identity_of(model).layers
    kept = frozenset().union(*(spec.components for spec in layers))
    if name not in FAMILIES:
        assert kept == {"K"}
        return
    row = next(line for line in support_matrix().splitlines() if line.startswith(f"| `{name}`"))
    claimed = {c for c, cell in zip("KRC", row.split("|")[2:5], strict=True) if cell.strip() != "–"}
    assert kept == claimed
    for index, spec in enumerate(layers):
        if spec.recurrent_state:
            assert len(spec.recurrent_state) == len(rule.recurrent_axes)
        if spec.conv_state:
            layout = rule.conv_layout(text_config(model))
            starts = [start for _, start, _ in layout]
            assert starts == [sum(size for _, _, size in layout[:i]) for i in range(len(layout))]
            assert sum(size for _, _, size in layout) == spec.conv_state[0]
        if index in rule.stateless_layers(text_config(model)):
            assert spec.kind == "empty"


@pytest.mark.parametrize("page", ["docs/support_matrix.md", "README.md"])
def test_shown_matrices_are_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text()
    marked = re.search(r"<!-- matrix -->\n(.*)<!-- /matrix -->", text, re.DOTALL)
    if page == "README.md" and marked is None:
        pytest.skip("no matrix in the README")
    shown = marked[1] if marked else text
    assert shown.strip() == support_matrix().strip(), "run python -m statebridge.capture.matrix"
