"""The command table. One command, one function; the functions import what they need when called."""

from __future__ import annotations

from typing import Annotated

import typer

import backquant
from backquant.cli import accuracy_commands, export_command, model_commands, spec_commands
from backquant.cli.accuracy_commands import conform
from backquant.cli.demo.command import demo
from backquant.cli.parts_command import migrate, quantize_parts

app = typer.Typer(
    name="backquant",
    no_args_is_help=True,
    rich_markup_mode=None,  # the pretty help imports for longer than the command runs
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"backquant {backquant.__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit status: 0 done, 1 the answer is no (check failed, coverage too low), 2 bad usage."
)
def _app(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Quantization for PyTorch, driven by a declarative description of the backend."""


for _command in (
    spec_commands.backends,
    spec_commands.show,
    spec_commands.diff,
    spec_commands.check,
    spec_commands.schema,
    conform,
    model_commands.explain,
    model_commands.quantize,
    quantize_parts,
    model_commands.inspect,
    accuracy_commands.compare,
    accuracy_commands.sensitivity,
    accuracy_commands.search,
    export_command.export,
    migrate,
    demo,
):
    app.command()(_command)
