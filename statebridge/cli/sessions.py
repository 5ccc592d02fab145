"""`statebridge sessions`: look after a store of sessions."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statebridge.cli.fingerprint import fingerprint
from statebridge.cli.options import Format, FormatOption, print_json
from statebridge.errors import StoreError

if TYPE_CHECKING:
    from statebridge.sessions import Checkpoint, SessionStore

sessions = typer.Typer(no_args_is_help=True, help="Look after a store of sessions.")
sessions.command()(fingerprint)

StoreOption = Annotated[
    Path, typer.Option("--store", envvar="STATEBRIDGE_STORE", help="Folder of the store.")
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Checkpoint id, or a beginning of it.")]
LabelOption = Annotated[str, typer.Option(help="A line of free text.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@sessions.command()
def ls(store: StoreOption, format: FormatOption = Format.human) -> None:
    """List checkpoints, oldest first. OWN is what deleting one alone would free.

    [bold]Example[/bold]

        statebridge sessions ls --store chats
    """
    checkpoints = _opened(store).list()
    if format is Format.json:
        print_json({"checkpoints": [dataclasses.asdict(checkpoint) for checkpoint in checkpoints]})
    else:
        _print_checkpoints(checkpoints)


@sessions.command()
def show(identifier: IdArgument, store: StoreOption, format: FormatOption = Format.human) -> None:
    """Show what a checkpoint holds, and the line it comes from.

    [bold]Example[/bold]

        statebridge sessions show 3f2a --store chats
    """
    opened = _opened(store)
    identifier = _resolved(opened, identifier)
    line = opened.lineage(identifier)
    buffers = [
        dataclasses.asdict(entry.spec) | {"nbytes": entry.spec.nbytes, "chunks": len(entry.chunks)}
        for entry in opened.manifest(identifier).buffers
    ]
    if format is Format.json:
        print_json(dataclasses.asdict(line[0]) | {"lineage": [c.id for c in line], "buffers": buffers})
        return
    _print_checkpoints(line)
    rows = (
        [b["name"], b["kind"], b["dtype"], _axes(b["shape"], b["grows"]), _size(b["nbytes"])] for b in buffers
    )
    _print_table(("BUFFER", "KIND", "DTYPE", "SHAPE", "SIZE"), rows)


@sessions.command()
def fork(
    identifier: IdArgument,
    store: StoreOption,
    label: LabelOption = "",
    dry_run: DryRunOption = False,
    format: FormatOption = Format.human,
) -> None:
    """Begin a new line at a checkpoint. No content is copied.

    [bold]Example[/bold]

        statebridge sessions fork 3f2a --store chats --label "the other answer"
    """
    opened = _opened(store)
    parent = _resolved(opened, identifier)
    child = None if dry_run else opened.fork(parent, label)
    if format is Format.json:
        print_json({"parent": parent, "id": child, "dry_run": dry_run})
    else:
        typer.echo(f"would fork {parent}" if child is None else child)


@sessions.command()
def rm(
    identifiers: Annotated[list[str], typer.Argument(metavar="ID...", help="Checkpoint ids, or beginnings.")],
    store: StoreOption,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    format: FormatOption = Format.human,
) -> None:
    """Delete checkpoints; their children stay whole. `gc` frees the space.

    [bold]Example[/bold]

        statebridge sessions rm 3f2a 91c0 --store chats --yes
    """
    opened = _opened(store)
    chosen = [_resolved(opened, identifier) for identifier in dict.fromkeys(identifiers)]
    if not dry_run:
        _confirm(f"Delete {len(chosen)} checkpoint(s) from {store}?", yes)
        for identifier in dict.fromkeys(chosen):
            opened.delete(identifier)
    if format is Format.json:
        print_json({"deleted": chosen, "dry_run": dry_run})
    else:
        typer.echo(
            "\n".join(f"{'would delete' if dry_run else 'deleted'} {identifier}" for identifier in chosen)
        )


@sessions.command()
def verify(store: StoreOption, format: FormatOption = Format.human) -> None:
    """Read every byte and compare it with its digest; exit code 1 when something is damaged.

    [bold]Example[/bold]

        statebridge sessions verify --store chats
    """
    found = _opened(store).verify()
    if format is Format.json:
        print_json(dataclasses.asdict(found))
    else:
        for identifier, problem in found.problems:
            typer.echo(f"{identifier[:12]}  {problem}")
        verdict = f"{len(found.problems)} problem(s)" if found.problems else "sound"
        typer.echo(f"{found.checkpoints} checkpoints, {found.blobs} blobs, {_size(found.nbytes)}: {verdict}")
    if found.problems:
        raise typer.Exit(1)


@sessions.command()
def gc(
    store: StoreOption,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    format: FormatOption = Format.human,
) -> None:
    """Remove content that no checkpoint names, and what killed writers left behind.

    [bold]Examples[/bold]

        statebridge sessions gc --store chats --dry-run

        statebridge sessions gc --store chats --yes
    """
    opened = _opened(store)
    if not dry_run:
        _confirm(f"Remove what no checkpoint of {store} names?", yes)
    removed = opened.gc(dry_run=dry_run)
    if format is Format.json:
        print_json(dataclasses.asdict(removed) | {"dry_run": dry_run})
    else:
        done = "would remove" if dry_run else "removed"
        typer.echo(
            f"{done} {removed.blobs} blobs and {removed.temporary} temporary files, {_size(removed.nbytes)}"
        )


@sessions.command()
def export(
    identifier: IdArgument,
    file: Annotated[Path, typer.Argument(help="New archive.")],
    store: StoreOption,
    format: FormatOption = Format.human,
) -> None:
    """Write one checkpoint to one file.

    [bold]Example[/bold]

        statebridge sessions export 3f2a chat.tar --store chats
    """
    opened = _opened(store)
    identifier = _resolved(opened, identifier)
    opened.export_archive(identifier, file)
    if format is Format.json:
        print_json({"id": identifier, "file": str(file), "bytes": file.stat().st_size})
    else:
        typer.echo(f"{file} ({_size(file.stat().st_size)})")


@sessions.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="Archive that `export` wrote.")],
    store: StoreOption,
    format: FormatOption = Format.human,
) -> None:
    """Take a checkpoint from an archive, every byte checked. The store is made if it is missing.

    [bold]Example[/bold]

        statebridge sessions import chat.tar --store chats
    """
    from statebridge.sessions import SessionStore

    identifier = SessionStore(store).import_archive(file)
    if format is Format.json:
        print_json({"id": identifier})
    else:
        typer.echo(identifier)


def _opened(path: Path) -> SessionStore:
    from statebridge.sessions import SessionStore

    return SessionStore(path, create=False)


def _resolved(store: SessionStore, beginning: str) -> str:
    """The one id that begins like this."""
    found = [identifier for identifier in store.identifiers() if identifier.startswith(beginning)]
    if len(found) != 1 or len(beginning) < 4:
        raise StoreError(
            f"{beginning!r} is the beginning of {len(found)} checkpoint ids; give at least four digits of one, "
            "as `statebridge sessions ls` shows them."
        )
    return found[0]


def _confirm(question: str, yes: bool) -> None:
    if not yes:
        typer.confirm(question, abort=True, err=True)


def _print_checkpoints(checkpoints: Sequence[Checkpoint]) -> None:
    known = {checkpoint.id for checkpoint in checkpoints}
    rows = []
    for c in checkpoints:
        parent = c.parent[:12] if c.parent else ""
        created = datetime.datetime.fromtimestamp(c.created).strftime("%Y-%m-%d %H:%M:%S")
        gone = " (elsewhere)" if c.parent and c.parent not in known else ""
        rows.append([c.id[:12], parent + gone, created, _size(c.nbytes), _size(c.own_nbytes), c.label])
    _print_table(("ID", "PARENT", "CREATED", "SIZE", "OWN", "LABEL"), rows)


def _print_table(header: Iterable[str], rows: Iterable[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, box=None)
    for row in rows:
        table.add_row(*map(str, row))
    Console(highlight=False, markup=False).print(table)


def _axes(shape: Sequence[int], grows: int | None) -> str:
    """[1, 4, 512+, 64], where + marks the axis that grows."""
    return "[" + ", ".join(f"{n}+" if axis == grows else str(n) for axis, n in enumerate(shape)) + "]"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
