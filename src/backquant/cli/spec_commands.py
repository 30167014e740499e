"""Commands about descriptions: ``backends``, ``show``, ``diff``, ``check``, ``schema``."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from backquant.cli.console import DONE, NO, emit, guarded, stop

if TYPE_CHECKING:
    from backquant.backend_config.validate import Finding


Json = Annotated[bool, typer.Option("--json", help="Print data instead of text.")]
Backend = Annotated[str, typer.Argument(help="A backend's name, or a YAML or JSON file.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        help="Package that a file may refer to, or folder whose files it may extend.",
    ),
]
_SHOWN = 3  # findings of one kind that are printed; --json has all


class Format(str, Enum):
    """Forms in which ``show`` prints a table."""

    text = "text"
    markdown = "markdown"
    html = "html"


class SchemaOf(str, Enum):
    """What ``schema`` prints the schema of."""

    BACKEND = "backend"
    ARTIFACT = "artifact"


def backends(as_json: Json = False) -> None:
    """List the backends that are found by name, and which of their engines run here."""
    from backquant.cli.listed import engine_here, listed_backends
    from backquant.pages import Table

    with guarded(as_json=as_json):
        rows = [
            {**backend._asdict(), "runs_here": engine_here(backend.engine)}
            for backend in listed_backends()
        ]
    cells = [["–" if cell is None else str(cell) for cell in row.values()] for row in rows]
    emit(Table.of("backend, engine, #entries, runs here", cells), as_json=as_json, data=rows)


def show(
    backend: Backend,
    as_json: Json = False,
    form: Annotated[Format, typer.Option("--format", help="What to print.")] = Format.text,
    allow: Allow = None,
) -> None:
    """Print what a backend supports, operator by operator, and its default observers."""
    from backquant.backend_config import derived as tables
    from backquant.cli.listed import engine_here
    from backquant.cli.models import load_backend
    from backquant.pages.html import to_html
    from backquant.pages.text import to_markdown

    with guarded(as_json=as_json):
        config = load_backend(backend, allow)
        shown = tables.document_of(config)
        rows = [row.to_dict() for row in tables.support_rows(config)]
    data = {
        "name": config.name,
        "engine": config.engine,
        "runs_here": engine_here(config.engine),
        "rows": rows,
        "defaults": tables.default_lines(config),
        "qdq": tables.qdq_lines(config),
        "slower": tables.slower_lines(config),
    }
    forms = {Format.markdown: to_markdown, Format.html: to_html}
    text = forms[form](shown).rstrip() if form in forms else shown
    emit(text, as_json=as_json, data=data)


def diff(a: Backend, b: Backend, as_json: Json = False, allow: Allow = None) -> None:
    """Print what differs between two backends, per operator and field. Exit 1 if they differ."""
    from backquant.cli.models import load_backend

    with guarded(as_json=as_json):
        difference = load_backend(a, allow).diff(load_backend(b, allow))
    emit(difference.render(), as_json=as_json, data=difference.to_dict())
    stop(NO if difference else DONE)


def check(
    spec: Annotated[
        str, typer.Argument(help="A YAML or JSON file, a backend's name, or an ONNX file.")
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="For an ONNX file: the target whose rules it is checked against (tensorrt).",
        ),
    ] = None,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Validate a description, or an ONNX file for a target. Exit 1 when there is an error."""
    from backquant.cli.onnx_check import check_file, is_onnx

    if target is not None or is_onnx(spec):
        check_file(spec, target, as_json=as_json)
        return
    from backquant.cli.models import findings

    with guarded(as_json=as_json):
        found = findings(spec, allow)
    counts = dict.fromkeys(("error", "warning", "note"), 0)
    for finding in found:
        counts[finding.severity] += 1
    total = ", ".join(f"{n} {name}{'' if n == 1 else 's'}" for name, n in counts.items())
    lines = [*_finding_lines(found), f"{spec}: {total}"]
    data = {"spec": spec, "findings": [finding.to_dict() for finding in found], **counts}
    emit("\n".join(lines), as_json=as_json, data=data)
    stop(NO if counts["error"] else DONE)


def _finding_lines(found: list[Finding]) -> Iterator[str]:
    """Each finding; of many that say the same about different places, the first ones."""
    order = {"error": 0, "warning": 1, "note": 2}

    def kind(finding: Finding) -> tuple[int, str, str]:
        return order[finding.severity], finding.rule, finding.message

    for _, group in groupby(sorted(found, key=kind), key=kind):
        same = list(group)
        few = same if len(same) <= _SHOWN + 1 or same[0].severity == "error" else same[:_SHOWN]
        yield from map(str, few)
        if len(few) < len(same):
            yield f"  … and the same at {len(same) - len(few)} more places (--json lists them)"


def schema(
    of: Annotated[
        SchemaOf, typer.Option("--of", help="Descriptions of backends, or saved models.")
    ] = SchemaOf.BACKEND,
    as_json: Json = True,  # noqa: ARG001 - accepted as on every command
) -> None:
    """Print the JSON Schema of description files, or of saved models. It is JSON with and without --json."""
    from backquant.cli.listed import artifact_schema, published_schema

    data = published_schema() if of is SchemaOf.BACKEND else artifact_schema()
    emit("", as_json=True, data=data)
