"""Write the files that are made from the package: docs/backends.md, docs/reasons.md, the schema of spec
files, and the list of backends that ``backquant backends`` prints without importing them.

With ``--check`` nothing is written: the exit status is 1 when a file is stale, and the first line that
differs is shown.

Usage: python tools/generate_backend_docs.py [--check]
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from backquant.artifact.manifest import json_schema as artifact_schema  # noqa: E402
from backquant.backend_config import get_backend_config, list_backends  # noqa: E402
from backquant.backend_config.derived import (  # noqa: E402
    default_lines,
    slower_lines,
    support_rows,
)
from backquant.backend_config.files import json_schema  # noqa: E402
from backquant.pages.markup import markdown  # noqa: E402
from backquant.reason_codes import ReasonCode  # noqa: E402

COMMAND = "python tools/generate_backend_docs.py"
INTRODUCTION = f"""\
# Backends

<!-- Written by `{COMMAND}`; edit the descriptions in src/backquant/backends instead. -->

What each backend quantizes, from its description. Everything about one, with dtypes, fused modules, sequences
and what stays float by default: `backquant show BACKEND` (or `--format html`). Two beside each other:
`backquant diff A B`.
"""
MOST = 4  # dtype configs of a backend that the page lists
MATRIX = """\
## Which operator where

**s** static, **d** dynamic (the input is quantized at run time, the result is float), **w** weights only.
Names in one row have the same support; `.name()` is a method.
"""
REASONS = f"""\
# Why an operator stays float

<!-- Written by `{COMMAND}`; edit src/backquant/reason_codes.py instead. -->

Every reason in a report has one of these codes (`rule`), with what was requested and is supported, and a fix
in code where there is one. The check of TensorRT's rules has codes of its own
([deploy-tensorrt.md](deploy-tensorrt.md)).

| code | what it means | what to do |
| --- | --- | --- |"""


def files() -> dict[Path, str]:
    """Every generated file with its content."""
    schema = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    artifact = json.dumps(artifact_schema(), indent=1, ensure_ascii=False) + "\n"
    package = ROOT / "src" / "backquant" / "backend_config" / "files"
    return {
        ROOT / "docs" / "backends.md": backends_page(),
        ROOT / "docs" / "reasons.md": reasons_page(),
        package / "schema_v1.json": schema,
        package.parent / "built_in.json": built_in(),
        ROOT / "src" / "backquant" / "artifact" / "schema_v2.json": artifact,
    }


def reasons_page() -> str:
    """The codes of reasons, in the order in which a model meets them."""
    rows = [f"| `{code}` | {code.meaning} | {code.remedy} |" for code in ReasonCode]
    return "\n".join([REASONS, *rows, ""])


def built_in() -> str:
    """Name, engine and number of entries of the backends of this package."""
    configs = {n: get_backend_config(n) for n in list_backends() if _module_file(n) is not None}
    rows = [
        {"name": name, "engine": config.engine, "entries": len(config.configs)}
        for name, config in configs.items()
    ]
    return json.dumps(rows, indent=1) + "\n"


def backends_page() -> str:
    """The page: an overview, operators by backend, then a section per backend of this package."""
    names = [name for name in list_backends() if _module_file(name) is not None]
    overview = ["|backend|patterns|modes|runs on|", "|---|---|---|---|"]
    for name in names:
        config = get_backend_config(name)
        modes = dict.fromkeys(mode for row in support_rows(config) for mode in row.modes)
        engine = config.engine or "files"
        overview.append(f"|[{name}](#{name})|{len(config.configs)}|{', '.join(modes)}|{engine}|")
    return "\n".join(
        [INTRODUCTION, *overview, "", MATRIX, *matrix(names), "", *map(section, names)]
    )


def matrix(names: Sequence[str]) -> list[str]:
    """A row for each support that operators have, a column for each backend."""
    support: dict[str, dict[str, str]] = {}
    for name in names:
        for row in support_rows(get_backend_config(name)):
            letters = "".join(sorted(mode[0] for mode in row.modes if mode != "float"))
            for operator in _single(row.operators):
                cells = support.setdefault(operator, {})
                cells[name] = "".join(sorted(set(cells.get(name, "") + letters)))
    groups: dict[tuple[str, ...], list[str]] = {}
    for operator, cells in support.items():
        groups.setdefault(tuple(cells.get(name, "") for name in names), []).append(operator)
    lines = [f"|operators|{'|'.join(names)}|", "|---" * (len(names) + 1) + "|"]
    for cells, operators in groups.items():
        lines.append(f"|{', '.join(f'`{operator}`' for operator in operators)}|{'|'.join(cells)}|")
    return lines


def _single(patterns: Iterable[str]) -> list[str]:
    """The operators that are a pattern alone, without the modules that patterns become."""
    parts = [part.strip() for pattern in patterns for part in pattern.split(",")]
    return [
        part for part in parts if re.fullmatch(r"(nn|F|torch|operator|aten)?\.[\w.]+(\(\))?", part)
    ]


def section(name: str) -> str:
    """One backend: what its module says, what it observes with, its dtypes."""
    config = get_backend_config(name)
    about = inspect.cleandoc(import_module(f"backquant.backends.{name}").__doc__ or "")
    dtypes = dict.fromkeys(text for row in support_rows(config) for text in row.dtypes)
    plain = [line for line in default_lines(config) if line.startswith(("activation", "weight"))]
    rules = [*plain, *slower_lines(config)]
    parts = [f"## {name}", "", about.split("\n\n")[0], ""]
    parts += [f"- {line.replace('_', chr(92) + '_')}" for line in rules]
    parts += [f"- {markdown(text)}" for text in dtypes][:MOST]
    if len(dtypes) > MOST:
        parts.append(f"- {len(dtypes) - MOST} more: `backquant show {name}`")
    return "\n".join([*parts, ""])


def _module_file(name: str) -> Path | None:
    path = ROOT / "src" / "backquant" / "backends" / f"{name}.py"
    return path if path.exists() else None


def difference(path: Path, wanted: str) -> str:
    """Why ``path`` is stale; empty when it is current."""
    shown = path.relative_to(ROOT)
    if not path.exists():
        return f"{shown} is missing"
    have = path.read_text(encoding="utf-8").splitlines()
    want = wanted.splitlines()
    for number, (old, new) in enumerate(zip(have, want, strict=False), start=1):
        if old != new:
            return f"{shown}:{number} is stale:\n  - {old}\n  + {new}"
    return "" if have == want else f"{shown} has {len(have)} lines, not {len(want)}"


def main(arguments: list[str]) -> int:
    """Write the files, or compare them with what they should be."""
    unknown = [word for word in arguments if word != "--check"]
    if unknown:
        print(__doc__, file=sys.stderr)
        return 2
    stale = {path: text for path, text in files().items() if difference(path, text)}
    if "--check" in arguments:
        for path, text in stale.items():
            print(difference(path, text))
        if stale:
            print(f"run: {COMMAND}")
        return 1 if stale else 0
    for path, text in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
