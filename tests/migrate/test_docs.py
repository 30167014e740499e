"""docs/migrating.md: its tables are those of the package, its examples are true.

``BACKQUANT_WRITE_MESSAGES=1`` writes the tables; read the diff before committing it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from backquant.migrate import migrate_source
from backquant.migrate.by_hand import GROUPS
from backquant.migrate.names import FLAT, FUSERS, MODULES, NN, PRIVATE, RENAMED_CALLS

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


def by_hand_table() -> str:
    lines = ["| what | names | why | what to do |", "| --- | --- | --- | --- |"]
    for group in GROUPS:
        names = [*group.packages, *(name for name in group.names if not name.startswith("_"))]
        shown = ", ".join(f"`{name}`" for name in names)
        kind = group.kind + (" (the file stays as it is)" if group.holds else "")
        lines.append(f"| {kind} | {shown} | {group.why} | {group.how} |")
    return "\n".join(lines)


def names_table() -> str:
    places: dict[str, list[str]] = {}
    for module, place in sorted(MODULES.items()):
        places.setdefault(place, []).append(module)
    lines = ["| in PyTorch | in backquant |", "| --- | --- |"]
    for place, modules in sorted(places.items()):
        public = [module for module in modules if "._" not in module]
        lines.append(f"| {', '.join(f'`{module}`' for module in public)} | `{place}` |")
    others = {
        **{f"torch.ao.quantization.{n}": t for n, t in PRIVATE.items() if not n.startswith("_")},
        **{f"torch.ao.quantization.{old}": FLAT[new] for old, new in RENAMED_CALLS.items()},
    }
    lines += [f"| `{name}` | `{target}` |" for name, target in sorted(others.items())]
    names = ", ".join(f"`{name}`" for name in sorted(FLAT))
    fusers = ", ".join(f"`{name}`" for name in FUSERS)
    classes = [
        f"- `backquant.nn.{package}`: {', '.join(f'`{name}`' for name in sorted(NN[package]))}"
        for package in sorted(NN)
    ]
    return "\n".join(
        [
            *lines,
            "",
            f"Names of `torch.ao.quantization` and its modules that stay: {names}.",
            "",
            f"In `backquant.nn.intrinsic.fusers`: {fusers}.",
            "",
            "Classes of `torch.ao.nn` that stay, by package:",
            "",
            *classes,
        ]
    )


@pytest.mark.parametrize(("mark", "table"), [("by hand", by_hand_table), ("names", names_table)])
def test_tables(mark: str, table: object) -> None:
    pattern = re.compile(rf"(<!-- {mark}: [^\n]*-->\n)(.*?)(<!-- end -->)", re.S)
    text = PAGE.read_text(encoding="utf-8")
    wanted = table() + "\n"  # type: ignore[operator]
    if os.environ.get("BACKQUANT_WRITE_MESSAGES"):
        text = pattern.sub(lambda found: found[1] + wanted + found[3], text)
        PAGE.write_text(text, encoding="utf-8")
    found = pattern.search(text)
    assert found is not None
    assert found[2] == wanted


def test_every_kind_that_is_reported_of_names_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"| {group.kind}" in text for group in GROUPS)


IMPORTS = (
    "from torch.ao.quantization import QConfigMapping, get_default_qconfig_dict\n"
    "from torch.ao.quantization.quantize_fx import prepare_fx, convert_fx, convert_to_reference_fx\n"
)


def test_examples_are_true() -> None:
    """The rows of the table that are code: their left side becomes their right side."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.split("## What is rewritten")[1].split("##")[0]
    rows = re.findall(r"^\| `([^`]*)` \| `([^`]*)` \|$", section, re.M)
    checked = 0
    for before, after in rows:
        if "…" in before or "*" in before:
            continue
        code = before if "import " in before or "torch." in before else IMPORTS + before
        code = f"import torch\n{code}" if before.startswith("torch.") else code
        assert migrate_source(code + "\n").after.splitlines()[-1] == after
        checked += 1
    assert checked >= 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # PyTorch's
def test_objects_at_run_time() -> None:
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(compile(first, "docs/migrating.md", "exec"), names)
    exec(compile(second, "docs/migrating.md", "exec"), names)
    quantized, x = names["quantized"], names["x"]
    assert quantized.kernels
    torch.testing.assert_close(quantized(x), names["model"](x), rtol=0, atol=0.1)
