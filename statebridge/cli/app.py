"""The command line: one verb per file, registered here by one line each.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 done, 1 error, 2 usage, 3 a gate failed,
4 incompatible states or models. Verbs import heavy libraries inside their functions, so that help is fast.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from statebridge.cli.calibrate import calibrate
from statebridge.cli.demo import demo
from statebridge.cli.doctor import doctor
from statebridge.cli.evaluate import evaluate
from statebridge.cli.fit import fit
from statebridge.cli.handoff import handoff
from statebridge.cli.inspect import inspect
from statebridge.cli.prune import prune
from statebridge.cli.report import report
from statebridge.cli.reproduce import reproduce
from statebridge.cli.sessions import sessions
from statebridge.cli.worlds import worlds
from statebridge.errors import StatebridgeError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Move the inference state of a hybrid language model into a bigger one.",
)
app.command()(demo)
app.command()(doctor)
app.command()(inspect)
app.command()(fit)
app.command()(calibrate)
app.command()(handoff)
app.command()(evaluate)
app.command()(report)
app.command()(reproduce)
app.add_typer(sessions, name="sessions")
app.command()(prune)
app.add_typer(worlds, name="worlds")


@app.callback()
def _before_any_verb(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    # `main` looks for --debug itself, because it must know it after the verb failed
    return


def main() -> None:
    """Run the command line; an error a user can act on is one sentence on stderr."""
    try:
        app()
    except StatebridgeError as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
