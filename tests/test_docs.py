"""Python blocks of the README and of pages with worked examples run as they stand, from the root of the checkout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/tutorial.md",
        "docs/sessions.md",
        "docs/fingerprint.md",
        "docs/worlds.md",
        "docs/pruning.md",
    ],
)
def test_blocks_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one page share their names, in order."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        line = text[: text.index(block)].count("\n")
        # blank lines in front make a traceback point into the page
        exec(compile("\n" * line + block, name, "exec"), scope)


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")]), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
        assert (page.parent / target).exists(), target
