from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.backend_config import MatchAllNode, get_backend_config, list_backends, short_name
from backquant.nn import intrinsic, qat
from backquant.nn.intrinsic import qat as intrinsic_qat
from backquant.nn.quantized import reference
from backquant.operators import all_operators, find, find_root, module_for_call

# Listed in entries of PyTorch's backends, though a tensor has no such method: no graph shows them.
NO_METHODS = {"hardsigmoid", "hardsigmoid_", "leaky_relu"}
# `shape` is an attribute of a tensor, which a trace reads with getattr.
NOT_CALLED = {"shape"}


def test_names_and_spellings_are_unique() -> None:
    operators = all_operators()
    assert len({o.name for o in operators}) == len(operators)
    spellings = Counter(s for o in operators for s in o.spellings)
    assert {s for s, n in spellings.items() if n > 1} == set()


@pytest.mark.parametrize("record", all_operators(), ids=lambda o: o.name)
def test_every_spelling_finds_its_operator(record: Any) -> None:
    assert record.spellings
    for spelling in record.spellings:
        assert find(spelling) is record
    for cls in record.derived:
        assert find(cls) is None
        assert find_root(cls) is record


@pytest.mark.parametrize("name", list_backends())
def test_every_operator_of_every_backend_is_known(name: str) -> None:
    unknown = set()
    for config in get_backend_config(name).configs:
        for node in config.normal_pattern.nodes:
            if node.kind in ("any", "literal"):
                continue
            record = find_root(node.op) if isinstance(node.op, type) else find(node.op)
            if record is None:
                unknown.add(node.op)
    assert unknown - NO_METHODS - NOT_CALLED - {operator.getitem, MatchAllNode} == set()


@pytest.mark.parametrize("name", sorted(NO_METHODS))
def test_methods_without_operator_do_not_exist(name: str) -> None:
    assert not hasattr(torch.Tensor, name)


def test_strangers_are_not_found() -> None:
    assert find(print) is None
    assert find("no_such_method") is None
    assert find([]) is None
    assert find_root(nn.Module) is None


def test_roots_of_fused_qat_and_reference_classes() -> None:
    for cls in (
        intrinsic.ConvReLU2d,
        intrinsic.ConvAdd2d,
        intrinsic_qat.ConvBnReLU2d,
        qat.Conv2d,
        reference.Conv2d,
        nn.Conv2d,
    ):
        root = find_root(cls)
        assert root is not None
        assert root.name == "conv2d"


@pytest.mark.parametrize("record", all_operators(), ids=lambda o: o.name)
def test_weight_indices_point_at_the_arguments_of_that_name(record: Any) -> None:
    """Checked on the schemas of the aten overloads, which name their arguments."""
    weight = record.weight_index
    bias = record.bias_index
    if record.aten_weight_index is not None:
        weight, bias = record.aten_weight_index, record.aten_bias_index
    for overload in record.aten:
        names = [argument.name for argument in overload._schema.arguments]
        if "weight" in names:
            assert weight == names.index("weight")
            assert bias == (names.index("bias") if "bias" in names else None)


@pytest.mark.parametrize(
    "record", [o for o in all_operators() if o.is_weighted and o.modules], ids=lambda o: o.name
)
def test_channel_axis_counts_the_outputs(record: Any) -> None:
    """The samples have 6 outputs (rows of 6 for tables); gates multiply them."""
    module = record.example().module
    for name, weight in module.named_parameters():
        if name.startswith("weight"):
            outputs = weight.shape[record.weight_channel_axis]
            assert outputs == 10 if record.family == "embedding" else outputs % 6 == 0


def test_weight_positions_of_matrix_products() -> None:
    addmm, mm = find(torch.ops.aten.addmm.default), find(torch.ops.aten.mm.default)
    assert addmm is not None
    assert (addmm.weight_index, addmm.bias_index, addmm.weight_channel_axis) == (2, 0, 1)
    assert mm is not None
    assert (mm.weight_index, mm.bias_index, mm.weight_channel_axis) == (1, None, 1)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "expected"),
    [
        (F.relu, (), {"inplace": True}, "ReLU(inplace=True)"),
        ("relu", (), {}, "ReLU()"),
        (torch.relu, (), {}, "ReLU()"),
        (F.leaky_relu, (0.3,), {}, "LeakyReLU(negative_slope=0.3)"),
        (F.leaky_relu, (), {"negative_slope": 0.3}, "LeakyReLU(negative_slope=0.3)"),
        (torch.tanh, (), {}, "Tanh()"),
        (F.relu6, (), {}, "ReLU6()"),
        (F.hardtanh, (-2.0, 2.0), {}, "Hardtanh(min_val=-2.0, max_val=2.0)"),
    ],
)
def test_module_for_call(target: Any, args: Any, kwargs: Any, expected: str) -> None:
    module = module_for_call(target, args, kwargs)
    assert repr(module) == expected
    x = torch.linspace(-3, 3, 13)
    if isinstance(target, str):
        assert torch.equal(module(x.clone()), getattr(x.clone(), target)(*args, **kwargs))
    else:
        assert torch.equal(module(x.clone()), target(x.clone(), *args, **kwargs))


def test_no_module_for_a_call_of_another_kind() -> None:
    assert module_for_call(torch.add, (1,), {}) is None
    assert module_for_call(print, (), {}) is None


@pytest.mark.parametrize(
    ("record", "spelling"),
    [
        pytest.param(o, s, id=f"{o.name}-{short_name(s)}")
        for o in all_operators()
        if o.as_module is not None
        for s in (*o.functions, *o.methods)
    ],
)
def test_module_for_a_traced_call_computes_the_same(record: Any, spelling: Any) -> None:
    """A trace writes out the defaults of some functions as keywords: the module takes them all."""
    module, inputs = record.example_of(spelling)
    [node] = [n for n in fx.symbolic_trace(module).graph.nodes if n.op.startswith("call_")]
    made = module_for_call(node.target, node.args[1:], dict(node.kwargs))
    assert made is not None
    expected = module(*(x.clone() for x in inputs))
    assert torch.equal(made(*(x.clone() for x in inputs)), expected)
