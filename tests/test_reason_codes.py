"""The table of codes is the codes that the package gives: none is missing, none is left over."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import backquant
from backquant.reason_codes import ReasonCode

SOURCE = Path(backquant.__file__).parent
CODES = {code.value for code in ReasonCode}
#: Where the code stands among the arguments of what makes a reason, or adds to one.
POSITIONS = {"refuse": 0, "Refusal": 0, "Reason": 1, "ReasonRow": 0, "_leave": 1, "append": 0}


def literals(node: ast.expr) -> Iterator[str]:
    """The texts that an argument may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*literals(node.body), *literals(node.orelse))
    elif isinstance(node, ast.Tuple) and node.elts:  # an open question: rule, bound, demand
        yield from literals(node.elts[0])


def given(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id.lower() == "rule" for target in node.targets
        ):
            yield from literals(node.value)
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        place = POSITIONS.get(name, len(node.args))
        named = [keyword.value for keyword in node.keywords if keyword.arg == "rule"]
        for argument in (*node.args[place : place + 1], *named):
            yield from literals(argument)


def members(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "ReasonCode":
            yield ReasonCode[node.attr].value


def test_every_code_is_in_the_table_and_every_row_is_given() -> None:
    rooms = ("match", "prepare", "convert", "report", "lower", "runtime")
    rooms += ("engines", "pipeline", "speed", "accuracy", "deploy")
    paths = [path for room in rooms for path in (SOURCE / room).rglob("*.py")]
    paths = [path for path in paths if "tensorrt" not in path.parts]
    written = {path: set(given(path)) & CODES for path in paths}
    found = set().union(*written.values(), *map(members, paths))
    found |= {"standalone", "custom_module"}  # the value of a MatchKind
    assert CODES - found == set()
    assert {code for code in found if "-" in code and " " not in code} - CODES == set()
    assert {path for path, codes in written.items() if codes} == set()


def test_a_row_says_what_it_means_and_what_to_do() -> None:
    assert all(code.meaning and code.remedy for code in ReasonCode)
