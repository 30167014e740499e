"""The edges of conditions: for each bound of ``where`` the use that lies at it, and the next one beyond.

Uses near the recorded one are tried until one has the value of the bound (or the nearest the operator can
have), and fulfils the rest of the condition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from backquant.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig
from backquant.backend_config.conditions import (
    AllOf,
    Comparison,
    Condition,
    Literals,
    comparisons_in,
    conjuncts,
    quantities_of,
)
from backquant.backend_config.conditions.expressions import Number
from backquant.conformance.models import FloatModel, NoExampleError, float_model
from backquant.conformance.samples import variants
from backquant.graph import GraphIndex
from backquant.graph.shapes import GraphValues
from backquant.match.conditions import unmet, value_of
from backquant.operators.facts import Unknown, UseFacts
from backquant.operators.operator import Operator, Sample

#: What is known only of the weight as it is asked for.
_ASKED = ("weight_sums", "group_size")


@dataclass(frozen=True)
class Bound:
    """A use at one bound: ``inside`` of the condition, or just beyond; ``None``: no use was found."""

    name: str
    inside: bool
    part: Condition
    sample: Sample | None


@dataclass(frozen=True)
class _Use:
    sample: Sample
    facts: UseFacts
    unmet: tuple[Condition, ...]


def condition_of(entry: BackendPatternConfig, config: DTypeConfig) -> Condition | None:
    """What has to hold for ``config`` of ``entry``."""
    parts = (*conjuncts(entry.where), *conjuncts(config.where))
    return AllOf(parts) if len(parts) > 1 else next(iter(parts), None)


def bounds_of(
    entry: BackendPatternConfig, config: DTypeConfig, backend: BackendConfig, operator: Operator
) -> Iterator[Bound]:
    """Both sides of each comparison of the conditions.

    >>> import torch
    >>> from backquant.backend_config import get_backend_config
    >>> from backquant.operators import find
    >>> x86 = get_backend_config("x86")
    >>> entry = next(e for e in x86.configs if e.pattern is torch.nn.PReLU)
    >>> entry = entry.set_where({"num_parameters": 1})
    >>> found = bounds_of(entry, entry.dtype_configs[0], x86, find(entry.pattern))
    >>> [(each.name, each.inside, each.sample.module_args) for each in found]
    [('num_parameters = 1', True, ()), ('num_parameters = 1', False, (4,))]
    """
    condition = condition_of(entry, config)
    if condition is None:
        return
    uses = list(_uses(entry, condition, backend, operator))
    leaves = {(leaf, part): None for part in conjuncts(condition) for leaf in comparisons_in(part)}
    for leaf, part in leaves:
        for inside in (True, False):
            wanted = () if inside else (part,)
            fitting = [use for use in uses if use.unmet == wanted]
            sample = None if _asked(part) else _nearest(fitting, leaf)
            yield Bound(str(leaf), inside, part, sample)


def admitted(
    entry: BackendPatternConfig, config: DTypeConfig, backend: BackendConfig, operator: Operator
) -> Sample | None:
    """A use that the conditions admit, if one is found."""
    condition = condition_of(entry, config)
    found = () if condition is None else _uses(entry, condition, backend, operator)
    return next((use.sample for use in found if not use.unmet), None)


def _uses(
    entry: BackendPatternConfig, condition: Condition, backend: BackendConfig, operator: Operator
) -> Iterator[_Use]:
    for sample in variants(operator, _numbers(condition)):
        try:
            model = float_model(entry, backend, None, sample=sample)
        except (NoExampleError, RuntimeError, ValueError, TypeError, AssertionError):
            continue
        facts = _facts(model)
        known = (part for part in conjuncts(condition) if not _asked(part))
        broken = tuple(part for part in known if unmet(part, facts))
        yield _Use(sample, facts, broken)


def _asked(part: Condition) -> bool:
    return any(quantity.name in _ASKED for quantity in quantities_of(part))


def _facts(model: FloatModel) -> UseFacts:
    assert isinstance(model.module, fx.GraphModule)
    kinds = ("call_module", "call_function", "call_method")
    nodes = [node for node in model.module.graph.nodes if node.op in kinds]
    values = GraphValues(model.module, model.example())
    parts = {str(index): node for index, node in enumerate(nodes)}
    return UseFacts(GraphIndex(model.module), values, nodes[0], nodes[-1], parts)


def _numbers(condition: Condition) -> list[object]:
    """The values at bounds and beside them."""
    found: list[object] = []
    for leaf in comparisons_in(condition):
        for value in _right(leaf):
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                near = (value - 1, value, value + 1)
                found += [int(n) for n in near if math.isfinite(n) and 0 <= n < 1 << 20]
            else:
                found.append(value)
    return found


def _right(leaf: Comparison) -> Sequence[object]:
    if isinstance(leaf.right, Literals):
        return leaf.right.values
    return (leaf.right.value,) if isinstance(leaf.right, Number) else ()


def _nearest(uses: Sequence[_Use], leaf: Comparison) -> Sample | None:
    """The use whose value is nearest to the bound, of uses on one side of it; the first of equals."""
    far = [(_distance(use, leaf), index) for index, use in enumerate(uses)]
    known = [(distance, index) for distance, index in far if distance is not None]
    return uses[min(known)[1]].sample if known else None


def _distance(use: _Use, leaf: Comparison) -> float | None:
    left, bound = value_of(leaf.left, use.facts), _right(leaf)
    if isinstance(left, Unknown) or not left:
        return None
    if not bound:
        other = value_of(leaf.right, use.facts) if not isinstance(leaf.right, Literals) else ()
        if isinstance(other, Unknown):
            return None
        bound = other
    pairs = [(a, b) for a in left for b in bound]
    if all(isinstance(v, (int, float)) for pair in pairs for v in pair):
        return float(min(abs(a - b) for a, b in pairs))
    return 0.0 if any(a == b for a, b in pairs) else 1.0
