"""Commands about descriptions: ``backends``, ``show``, ``diff``, ``check``, ``schema``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from backquant.cli.console import DONE, NO, emit, guarded, stop

__all__ = ["backends", "check", "diff", "schema", "show"]

Json = Annotated[bool, typer.Option("--json", help="Print data instead of text.")]
Backend = Annotated[str, typer.Argument(help="A backend's name, or a YAML or JSON file.")]
Allow = Annotated[
    list[str] | None, typer.Option("--allow", help="Package that a file may name classes from.")
]


def backends(as_json: Json = False) -> None:
    """List the backends that are found by name."""
    from backquant.backend_config import get_backend_config, list_backends

    with guarded():
        rows = []
        for name in list_backends():
            config = get_backend_config(name)
            rows.append({"name": name, "engine": config.engine, "entries": len(config.configs)})
    table = Table("backend", "engine", "entries", show_edge=False)
    for row in rows:
        table.add_row(str(row["name"]), str(row["engine"] or "reference only"), str(row["entries"]))
    emit(as_json=as_json, data=rows, shown=table)


def show(
    backend: Backend,
    as_json: Json = False,
    form: Annotated[str, typer.Option("--format", help="text, markdown or html")] = "text",
) -> None:
    """Print what a backend supports, operator by operator."""
    from backquant.backend_config import get_backend_config, tables

    with guarded():
        config = get_backend_config(backend)
        rows = tables.support_rows(config)
        shown: Any = {
            "text": lambda: tables.to_text(config),
            "markdown": lambda: Text(tables.to_markdown(config)),
            "html": lambda: Text(tables.to_html(config)),
        }[_one_of(form, "text", "markdown", "html")]()
    emit(as_json=as_json, data=[row.to_dict() for row in rows], shown=shown)


def _one_of(value: str, *choices: str) -> str:
    if value not in choices:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}")
    return value


def diff(a: Backend, b: Backend, as_json: Json = False) -> None:
    """Print what differs between two backends, per operator and field. Exit 1 if anything does."""
    from backquant.backend_config import get_backend_config

    with guarded():
        difference = get_backend_config(a).diff(get_backend_config(b))
    emit(as_json=as_json, data=difference.to_dict(), shown=Text(difference.render()))
    stop(NO if difference else DONE)


def check(
    spec: Annotated[str, typer.Argument(help="A YAML or JSON file, or a backend's name.")],
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Validate a description and print the findings. Exit 1 when one of them is an error."""
    from backquant.backend_config import files, get_backend_config
    from backquant.backend_config.registry import is_spec_file

    with guarded():
        if is_spec_file(spec):
            findings = files.check_file(spec, allow=tuple(allow or ()))
        else:
            findings = get_backend_config(spec).validate()
    errors = [finding for finding in findings if finding.severity == "error"]
    data = [finding.to_dict() for finding in findings]
    counts = f"{len(errors)} errors, {len(findings) - len(errors)} warnings and notes"
    lines = [str(finding) for finding in findings] + [f"{spec}: {counts}"]
    emit(as_json=as_json, data=data, shown=Text("\n".join(lines)))
    stop(NO if errors else DONE)


def schema() -> None:
    """Print the JSON Schema of description files."""
    from backquant.backend_config import json_schema

    emit(as_json=True, data=json_schema(), shown="")
