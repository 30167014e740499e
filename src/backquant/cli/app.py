"""The command table. One command, one function; the functions import what they need when called."""

from __future__ import annotations

import typer

from backquant.cli import model_commands, spec_commands
from backquant.cli.demo.command import demo

__all__ = ["app"]

app = typer.Typer(
    name="backquant",
    help="Quantization for PyTorch, driven by a declarative description of the backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (
    spec_commands.backends,
    spec_commands.show,
    spec_commands.diff,
    spec_commands.check,
    spec_commands.schema,
    model_commands.explain,
    model_commands.quantize,
    model_commands.inspect,
    demo,
):
    app.command()(_command)
