"""What a report is made of, whatever its form: sections of paragraphs, pictures and tables, and gates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of text; the columns of `words` hold words, the others numbers; rows of `bold` stand out."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int] = frozenset({0})
    bold: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Picture:
    """A PNG with the name of its file and what it shows."""

    name: str
    alt: str
    png: bytes


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, in this order: paragraphs, pictures (side by side), tables."""

    title: str
    paragraphs: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Gate:
    """A gate as readers see it; `rows` are (inequality, measured, verdict)."""

    name: str
    meaning: str
    verdict: str
    rows: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Report:
    """Everything that a report says."""

    title: str
    conclusion: str
    headline: str
    summary: tuple[str, ...]
    gates: tuple[Gate, ...]
    sections: tuple[Section, ...]
