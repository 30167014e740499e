"""Random programs of import forms and uses: migrating twice is migrating once, and what a name
stands for afterwards is backquant's thing of that name."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backquant.migrate import migrate_source

CORPUS = Path(__file__).parent / "corpus" / "before"

#: How the package, or one of its modules, is imported; and how its names are written then.
FORMS = [
    ("import torch", "torch.ao.quantization."),
    ("import torch", "torch.quantization."),
    ("import torch.ao.quantization", "torch.ao.quantization."),
    ("import torch.ao.quantization as tq", "tq."),
    ("import torch.quantization as tq2", "tq2."),
    ("import torch.quantization as quantization", "quantization."),
    ("from torch import ao", "ao.quantization."),
    ("from torch.ao import quantization as Q", "Q."),
]
FORMS_FX = [
    ("import torch.ao.quantization.quantize_fx", "torch.ao.quantization.quantize_fx."),
    ("from torch.ao.quantization import quantize_fx", "quantize_fx."),
    ("from torch.ao.quantization import quantize_fx as fx", "fx."),
    ("import torch.ao.quantization.quantize_fx as qfx", "qfx."),
]
#: Names of the package, and of its module ``quantize_fx``.
NAMES = ["QConfig", "QConfigMapping", "MinMaxObserver", "default_qconfig", "FakeQuantize"]
NAMES_FX = ["QConfigMapping", "prepare_fx", "convert_fx", "fuse_fx", "BackendConfig"]
PERSON = ["fuse_known_modules", "get_default_qat_module_mappings", "default_eval_fn_of_mine"]
USES = [
    "probe({0})",
    'probe({0}) if torch_is_here else probe("no")',
    "def f{n}(torch=None, tq=None):\n    return {0}\nprobe(f{n}.__name__)",
    "class C{n}:\n    attribute = {0}\nprobe(C{n}.attribute)",
    "x{n} = [{0} for _ in range(2)]",
    "def g{n}():\n    {form}\n    return {0}\nprobe(g{n}())",
    "try:\n    {form}\nexcept ImportError:\n    pass\nprobe({0})",
    '{0}  # a comment, and "{0}"',
]

use = st.one_of(
    st.tuples(st.sampled_from(FORMS), st.sampled_from(NAMES), st.sampled_from(USES)),
    st.tuples(st.sampled_from(FORMS_FX), st.sampled_from(NAMES_FX), st.sampled_from(USES)),
)
hand = st.tuples(st.sampled_from(FORMS), st.sampled_from(PERSON), st.just("probe({0})"))


def program(parts: list[tuple[tuple[str, str], str, str]]) -> str:
    imports = dict.fromkeys(form for (form, _), _, _ in parts)
    body = [
        shape.format(prefix + name, n=index, form=form)
        for index, ((form, prefix), name, shape) in enumerate(parts)
    ]
    return "\n".join(["# a program", *imports, "", *body, ""])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.one_of(use, use, use, hand), min_size=1, max_size=6))
def test_random_programs(parts: list[tuple[tuple[str, str], str, str]]) -> None:
    result = migrate_source(program(parts), "a.py")
    ast.parse(result.after)
    again = migrate_source(result.after, "a.py")
    assert again.after == result.after
    assert {(f.kind, f.what) for f in again.findings} == {(f.kind, f.what) for f in result.findings}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(use, min_size=1, max_size=6))
def test_names_stand_for_backquants(parts: list[tuple[tuple[str, str], str, str]]) -> None:
    """Run the migrated program, and look at what its names are.

    Where a parameter is called as the import (``torch``), uses of that import stay PyTorch's, and work.
    """
    result = migrate_source(program(parts), "a.py")
    seen: list[object] = []
    scope = {"probe": seen.append, "torch_is_here": True, "__name__": "program"}
    exec(compile(result.after, "a.py", "exec"), scope)
    values = {id(value) for value in seen if not isinstance(value, str)}
    hidden = "torch=None" in result.after
    assert values <= {*_ids("backquant"), *(_ids("torch") if hidden else ())}
    if not hidden:
        lines = [line for line in result.after.splitlines() if "#" not in line]
        assert [line for line in lines if re.search(r"torch\.(ao|quantization)", line)] == []


@functools.cache
def _ids(package: str) -> frozenset[int]:
    whole = importlib.import_module(f"{package}.ao.quantization")
    inner = importlib.import_module(f"{package}.ao.quantization.quantize_fx")
    pairs = [(whole, name) for name in NAMES] + [(inner, name) for name in NAMES_FX]
    return frozenset(id(getattr(module, name)) for module, name in pairs)


STATEMENTS = sorted(
    {
        f"{ast.unparse(statement)}\n"
        for path in CORPUS.glob("*.py")
        for statement in ast.parse(path.read_text(encoding="utf-8")).body
    }
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=12))
def test_random_mixtures_of_the_corpus(statements: list[str]) -> None:
    """Statements of all files, mixed: imports twice, missing, after their use, rebound names."""
    code = "".join(statements)
    result = migrate_source(code, "a.py")
    again = migrate_source(result.after, "a.py")
    assert again.after == result.after
    assert result.after.count("#") == code.count("#")


@pytest.mark.parametrize("end", ["\r\n", "\n"])
@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.py")), ids=lambda path: path.stem)
def test_the_corpus_in_a_function(path: Path, end: str) -> None:
    """Indented, and with other line ends: the result is the same but for that."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if any("import *" in line or '"""' in line for line in lines[1:]):
        lines = [line for line in lines if "import *" not in line]
    code = end.join(["def main():", *(f"    {line}" if line else "" for line in lines), ""])
    result = migrate_source(code, "a.py")
    assert result.after.count("\n") == result.after.count(end)
    assert migrate_source(result.after, "a.py").after == result.after
