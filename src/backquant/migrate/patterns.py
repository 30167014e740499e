"""Patterns in the reversed order of PyTorch 1.13, which cannot be told from forward ones for sure."""

from __future__ import annotations

import libcst as cst

from backquant.migrate.by_hand import ByHand
from backquant.migrate.decisions import Decisions, Resolved
from backquant.migrate.setters import string_keys

_REVERSED = ByHand(
    "reversed pattern",
    "it reads like a pattern of PyTorch 1.13, last operator first; today a tuple is in forward "
    "order, and this one would match nothing",
    "write it forward, (Conv2d, BatchNorm2d, ReLU), and have the fuser take its modules in that "
    'order; or BackendConfig.from_dict(d, version="1.13"); or, for a nested one, '
    "BackendPatternConfig()._set_pattern_complex_format(…)",
)
#: Operators that follow another one in the patterns of PyTorch's backends, and those they follow.
_FOLLOWERS = ("relu", "hardtanh", "batchnorm", "batch_norm", "bn", "leakyrelu", "tanh", "sigmoid")
_ROOTS = ("conv", "linear", "matmul", "bmm", "add", "mul", "cat")


def report_patterns(decisions: Decisions, resolved: Resolved, call: cst.Call) -> None:
    """Report a pattern that looks reversed in ``BackendPatternConfig(pattern)``."""
    name = resolved.target.rpartition(".")[2]
    if name == "BackendPatternConfig" and call.args and not call.args[0].star:
        _report(decisions, call.args[0].value)


def report_dict_patterns(decisions: Decisions, config: cst.BaseExpression) -> None:
    """Report patterns that look reversed in the dict of a backend, or of one entry."""
    entries = string_keys(config) or {}
    if "pattern" in entries:
        _report(decisions, entries["pattern"])
    configs = entries.get("configs")
    if isinstance(configs, (cst.List, cst.Tuple)):
        for element in configs.elements:
            report_dict_patterns(decisions, element.value)


def _report(decisions: Decisions, pattern: cst.BaseExpression) -> None:
    if looks_reversed(pattern):
        code = cst.Module([]).code_for_node(pattern)
        decisions.report(pattern, f"pattern {' '.join(code.split())}", _REVERSED)


def looks_reversed(pattern: cst.BaseExpression) -> bool:
    """Whether a pattern is nested, or begins with an operator that only follows others.

    >>> looks_reversed(cst.parse_expression("(nn.ReLU, nn.Conv2d)"))
    True
    >>> looks_reversed(cst.parse_expression("(nn.Conv2d, nn.ReLU)"))
    False
    """
    if not isinstance(pattern, cst.Tuple) or len(pattern.elements) < 2:
        return False
    items = [element.value for element in pattern.elements]
    if any(isinstance(item, cst.Tuple) for item in items):
        return True
    names = [_name(item) for item in items]
    return _is(names[0], _FOLLOWERS) and any(_is(name, _ROOTS) for name in names[1:])


def _name(item: cst.BaseExpression) -> str:
    if isinstance(item, cst.Attribute):
        return item.attr.value.lower()
    return item.value.lower() if isinstance(item, cst.Name) else ""


def _is(name: str, kinds: tuple[str, ...]) -> bool:
    return any(name.startswith(kind) for kind in kinds)
