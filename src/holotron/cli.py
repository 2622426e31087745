"""The command line: one thin function per verb.

Anything heavy (torch, transformers, Playwright) is imported inside the command that needs it, so that
`holotron --help` answers at once. How failures are worded is the business of `failures`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from holotron import __version__

app = typer.Typer(
    name="holotron",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holotron {__version__}")
        raise typer.Exit


@app.callback()
def holotron(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Computer use with hybrid Mamba-2/attention models: see a screen, decide, act.

    What goes wrong is said in one line on standard error; HOLOTRON_DEBUG=1 adds the traceback.
    """


@app.command()
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Say what is installed, found and missing, and the command that mends it.

    Exits with 1 if something that is needed is missing.
    """
    from holotron import doctor as examination

    checks = examination.examine()
    if as_json:
        typer.echo(examination.as_json(checks))
    else:
        examination.show(checks)
    raise typer.Exit(0 if examination.is_healthy(checks) else 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
    from holotron.failures import explain

    try:
        app(args=list(sys.argv[1:] if argv is None else argv), prog_name="holotron")
    except SystemExit as stop:
        if stop.code == 130:  # typer turns Ctrl-C into this, without a word
            typer.echo("holotron: interrupted", err=True)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as failure:
        message, code = explain(failure)
        typer.echo(message, err=True)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
