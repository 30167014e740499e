"""Every spelling of every operator has an example that runs, is reproducible, and is traceable."""

from __future__ import annotations

import inspect
import operator as builtins
from typing import Any

import pytest
import torch
from torch import fx, nn

from backquant.backend_config import short_name
from backquant.operators import all_operators

SHAPE_ONLY = {"size"}


def _id(operator: Any, spelling: Any) -> str:
    return f"{operator.name}-{short_name(spelling)}"


SPELLINGS = [pytest.param(o, s, id=_id(o, s)) for o in all_operators() for s in o.spellings]


def _tensor(result: Any) -> Any:
    while isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
        result = result[0]
    return result


@pytest.mark.parametrize(("operator", "spelling"), SPELLINGS)
def test_example_runs_and_is_reproducible(operator: Any, spelling: Any) -> None:
    results = []
    for _ in range(2):
        module, inputs = operator.example_of(spelling)
        assert not module.training
        results.append(_tensor(module(*inputs)))
    if operator.name in SHAPE_ONLY:
        assert results[0] == results[1] == 4
        return
    assert torch.equal(results[0], results[1])
    assert results[0].isfinite().all()
    assert results[0].numel() > 0


# a proxy has no ``__iadd__``: Python falls back to ``__add__``
_TRACED = {
    builtins.iadd: builtins.add,
    builtins.isub: builtins.sub,
    builtins.imul: builtins.mul,
}


@pytest.mark.parametrize(("operator", "spelling"), SPELLINGS)
def test_trace_shows_the_spelling(operator: Any, spelling: Any) -> None:
    module, _ = operator.example_of(spelling)
    if isinstance(spelling, type):
        module = nn.Sequential(module)
    calls = [n for n in fx.symbolic_trace(module).graph.nodes if n.op.startswith("call_")]
    [node] = calls
    shown = type(module[0]) if node.op == "call_module" else node.target
    assert shown == _TRACED.get(spelling, spelling)


@pytest.mark.parametrize("operator", all_operators(), ids=lambda o: o.name)
def test_spellings_compute_the_same_kind_of_result(operator: Any) -> None:
    """All spellings called with the sample's arguments give one shape; weights differ by module."""
    shapes = set()
    for spelling in operator.spellings:
        module, inputs = operator.example_of(spelling)
        result = _tensor(module(*inputs))
        shapes.add(result if operator.name in SHAPE_ONLY else result.shape)
    assert len(shapes) == 1


@pytest.mark.parametrize("operator", all_operators(), ids=lambda o: o.name)
def test_fixed_qparams_cover_the_output(operator: Any) -> None:
    if operator.fixed is None:
        assert operator.qparams.value != "fixed"
        return
    module, inputs = operator.example()
    result = module(*[10 * x for x in inputs])
    fixed = operator.fixed
    low = (fixed.quant_min - fixed.zero_point) * fixed.scale
    high = (fixed.quant_max - fixed.zero_point) * fixed.scale
    assert result.min() >= low
    assert result.max() <= high + fixed.scale


@pytest.mark.parametrize("operator", all_operators(), ids=lambda o: o.name)
def test_sharing_operators_keep_values_within_the_inputs_range(operator: Any) -> None:
    if not operator.shares_qparams:
        return
    module, inputs = operator.example()
    result = _tensor(module(*inputs))
    low = min(x.min() for x in inputs).clamp(max=0)
    high = max(x.max() for x in inputs).clamp(min=0)
    assert result.min() >= low
    assert result.max() <= high


@pytest.mark.parametrize("operator", all_operators(), ids=lambda o: o.name)
def test_unknown_spelling_is_refused(operator: Any) -> None:
    with pytest.raises(KeyError, match=f"no spelling of {operator.name}"):
        operator.example_of(inspect)
