"""Arguments that older code passes as dicts become the objects that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import libcst as cst

from backquant.migrate.by_hand import ByHand
from backquant.migrate.decisions import Decisions, Resolved
from backquant.migrate.local_names import Names
from backquant.migrate.names import RENAMED_CALLS
from backquant.migrate.patterns import report_dict_patterns
from backquant.migrate.setters import KEYS, chain, setters, string_keys

_WIDTH = 88
_INDENT = "    "
#: Keys of old dicts whose content is part of the backend's description today.
_DESCRIBED = (
    "additional_fuser_method_mapping",
    "additional_qat_module_mapping",
    "additional_fusion_pattern",
    "additional_quant_pattern",
    "additional_object_mapping",
)
_MOVED = ByHand(
    "old dict keys",
    "what this key adds is part of the backend's description",
    "BackendConfig.set_backend_pattern_config(BackendPatternConfig(pattern).set_fuser_method(…))",
)
_UNKNOWN_KEY = ByHand(
    "old dict keys",
    "this key is none of the config's",
    "remove it, or use one of the config's setters",
)
_STANDALONE = {"standalone_module_name": 5, "standalone_module_class": 5}
_OLD_STANDALONE = ByHand(
    "old dict keys",
    "a standalone module is described by five values: module, qconfig_mapping, example_inputs, "
    "prepare_custom_config, backend_config",
    "add example inputs of the standalone module, and its backend_config or None",
)


@dataclass(frozen=True, eq=False)
class ConfigArgument:
    """A config that a function is given: the class that it takes, the value, the function's use."""

    cls: str
    value: cst.BaseExpression
    function: Resolved

    @property
    def class_name(self) -> str:
        return self.cls.rpartition(".")[2]


def config_arguments(
    decisions: Decisions, arguments: list[ConfigArgument]
) -> set[cst.BaseExpression]:
    """Rewrite every config that is known to be a dict.

    1. A literal becomes calls of setters, where these can say the same. 2. So does the literal that
    is assigned to a variable, when the variable is used for nothing but such arguments. 3. Any
    other dict is wrapped: ``QConfigMapping.from_dict(…)``. What may not be a dict stays.

    Returns the calls of ``get_default_qconfig_dict`` whose result is wanted as a mapping.
    """
    read = {id(argument.value): argument for argument in arguments}
    mappings: set[cst.BaseExpression] = set()
    for argument in arguments:
        literal = literal_of(decisions.names, argument.value)
        if literal is not None:
            _report_keys(decisions, argument, literal)
        if isinstance(argument.value, cst.Dict):
            _rewrite(decisions, argument, argument.value)
        elif isinstance(argument.value, cst.Name):
            mappings |= _variable(decisions, argument, read)
        elif _is_renamed_call(decisions, argument.value):
            mappings.add(argument.value)
        elif _is_dict(decisions, argument.value):
            _wrap(decisions, argument)
    return mappings


def literal_of(names: Names, value: cst.BaseExpression) -> cst.Dict | None:
    """The dict literal that an argument is, directly or by a variable with one assignment."""
    if isinstance(value, cst.Dict):
        return value
    if isinstance(value, cst.Name):
        assigned = _assigned(names, value)
        if len(assigned) == 1 and isinstance(assigned[0], cst.Dict):
            annotated = isinstance(names.parents.get(assigned[0]), cst.AnnAssign)
            return None if annotated else assigned[0]
    return None


def _assigned(names: Names, name: cst.Name) -> list[cst.BaseExpression | None]:
    """The values of all assignments to a variable; None for one that is not ``name = value``."""
    return [
        _value_of(names, assignment) if type(assignment).__name__ == "Assignment" else None
        for assignment in names.assignments(name)
    ]


def _value_of(names: Names, assignment: Any) -> cst.BaseExpression | None:
    target = names.parents.get(assignment.node)
    if isinstance(target, cst.AnnAssign):
        return target.value
    statement = None if target is None else names.parents.get(target)
    if isinstance(statement, cst.Assign) and len(statement.targets) == 1:
        return statement.value
    return None


def _is_dict(decisions: Decisions, value: cst.BaseExpression | None) -> bool:
    if isinstance(value, (cst.Dict, cst.DictComp)):
        return True
    if not isinstance(value, cst.Call):
        return False
    if isinstance(value.func, cst.Name) and value.func.value == "dict":
        return not decisions.names.assignments(value.func)
    return _is_renamed_call(decisions, value)


def _rewrite(decisions: Decisions, argument: ConfigArgument, literal: cst.Dict) -> None:
    """Setters for a literal, or the literal wrapped."""
    if setters(argument.class_name, literal) is None:
        _wrap(decisions, argument)
        return
    cls = argument.function.spelled(argument.cls)
    alone = literal is not argument.value  # the value of an assignment: nothing around it
    layout = _Layout(decisions.names, literal, alone)
    decisions.changes.edit(literal, lambda updated: layout.chain(cls, argument, updated))


class _Layout:
    """Where a literal stands, which decides how the calls are laid out."""

    def __init__(self, names: Names, literal: cst.Dict, alone: bool) -> None:
        place = names.positions[literal]
        self.many_lines = place.start.line != place.end.line
        self.column = place.start.column
        self.alone = alone
        self.indent = _INDENT
        if not alone:
            line = names.wrapper.module.code.splitlines()[place.start.line - 1]
            own = len(line) - len(line.lstrip())
            base = _block_column(names, literal)
            self.indent = " " * max(own - base, len(_INDENT)) if own >= base else _INDENT
            if place.start.column != own:
                self.indent = " " * (own - base + len(_INDENT))

    def chain(self, cls: str, argument: ConfigArgument, literal: cst.Dict) -> cst.BaseExpression:
        calls = setters(argument.class_name, literal)
        assert calls is not None
        flat = chain(cls, calls, None)
        width = self.column + len(cst.Module([]).code_for_node(flat))
        fits = width <= _WIDTH
        if (fits and not self.many_lines) or len(calls) < 2:
            return flat
        if not self.alone:
            return chain(cls, calls, self.indent)
        inner = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(_INDENT))
        outer = cst.ParenthesizedWhitespace(indent=True)
        return chain(cls, calls, _INDENT).with_changes(
            lpar=[cst.LeftParen(whitespace_after=inner)],
            rpar=[cst.RightParen(whitespace_before=outer)],
        )


def _block_column(names: Names, node: cst.CSTNode) -> int:
    """The column of the statement that holds a node."""
    current: cst.CSTNode = node
    while not isinstance(current, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
        current = names.parents[current]
    return int(names.positions[current].start.column)


def _variable(
    decisions: Decisions, argument: ConfigArgument, read: dict[int, ConfigArgument]
) -> set[cst.BaseExpression]:
    names = decisions.names
    assert isinstance(argument.value, cst.Name)
    assigned = _assigned(names, argument.value)
    if not assigned or not all(_is_dict(decisions, value) for value in assigned):
        return set()
    uses = _uses(names, argument.value)
    alike = all(id(use) in read and read[id(use)].cls == argument.cls for use in uses)
    if alike and all(_is_renamed_call(decisions, value) for value in assigned):
        return {value for value in assigned if value is not None}
    literal = literal_of(names, argument.value)
    if literal is None or not alike or setters(argument.class_name, literal) is None:
        _wrap(decisions, argument)
    elif literal not in decisions.changes.edits:
        _rewrite(decisions, argument, literal)
    return set()


def _uses(names: Names, name: cst.Name) -> list[cst.Name]:
    """Every place where the name may have these values, but for the assignments themselves."""
    assignments = {id(a): a for a in names.assignments(name)}
    targets = {id(a.node) for a in assignments.values()}
    return [
        node
        for node in names.mentions.get(name.value, ())
        if id(node) not in targets and any(id(a) in assignments for a in names.assignments(node))
    ]


def _wrap(decisions: Decisions, argument: ConfigArgument) -> None:
    """``from_dict`` around the value."""
    cls = argument.function.spelled(argument.cls)
    maker = cst.parse_expression(f"{cls}.from_dict")
    decisions.changes.edit(argument.value, lambda updated: cst.Call(maker, [cst.Arg(updated)]))


def _is_renamed_call(decisions: Decisions, value: cst.BaseExpression | None) -> bool:
    return isinstance(value, cst.Call) and any(
        resolved.node is value.func and resolved.fate.symbol in RENAMED_CALLS
        for resolved in decisions.resolved
    )


def _report_keys(decisions: Decisions, argument: ConfigArgument, literal: cst.Dict) -> None:
    """Keys that the config's class does not take."""
    if argument.class_name == "BackendConfig":
        report_dict_patterns(decisions, literal)
        return
    standalone = _STANDALONE if argument.class_name == "PrepareCustomConfig" else {}
    known = {*KEYS[argument.class_name], *standalone}
    for key, value in (string_keys(literal) or {}).items():
        what = f"{argument.class_name} key {key!r}"
        if key in _DESCRIBED:
            decisions.report(value, what, _MOVED)
        elif key not in known:
            decisions.report(value, what, _UNKNOWN_KEY)
        elif key in standalone and _lengths(value) - {standalone[key]}:
            decisions.report(value, what, _OLD_STANDALONE)


def _lengths(value: cst.BaseExpression) -> set[int]:
    """The lengths of the tuples in a list literal."""
    rows = value.elements if isinstance(value, (cst.List, cst.Tuple)) else ()
    return {len(e.value.elements) for e in rows if isinstance(e.value, (cst.Tuple, cst.List))}
