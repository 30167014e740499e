"""Weight, bias, activation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from backquant.backend_config import get_x86_backend_config
from backquant.prepare.sites import Role, argument_nodes, argument_role, input_positions

POSITIONS = input_positions(get_x86_backend_config())


def _call(function, *args, **kwargs):
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in "xwb"}
    take = nodes.get
    picked = [take(a, a) if isinstance(a, str) else a for a in args]
    named = {k: take(v, v) if isinstance(v, str) else v for k, v in kwargs.items()}
    return graph.call_function(function, tuple(picked), named), nodes


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [("xwb", {}), ("xw", {"bias": "b"}), ("x", {"weight": "w", "bias": "b"})],
)
@pytest.mark.parametrize("function", [F.linear, F.conv2d, F.conv_transpose1d])
def test_positions_and_keywords(function, args, kwargs):
    node, values = _call(function, *args, **kwargs)
    roles = [argument_role(node, values[name], POSITIONS) for name in "xwb"]
    assert roles == [Role.INPUT, Role.WEIGHT, Role.BIAS]


def test_a_value_passed_twice_is_the_weight():
    node, values = _call(F.linear, "x", "x")
    assert argument_role(node, values["x"], POSITIONS) is Role.WEIGHT


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (F.layer_norm, ((4,),)),
        (F.group_norm, (2,)),
        (F.rms_norm, ((4,),)),
        (F.instance_norm, (None, None)),
        (F.batch_norm, (None, None)),
    ],
)
def test_weights_of_normalizations_stay_float(function, sizes):
    node, values = _call(function, "x", *sizes, weight="w")
    assert argument_role(node, values["w"], POSITIONS) is Role.NONE
    by_position, values = _call(function, "x", *sizes, "w")
    assert argument_role(by_position, values["w"], {}) is Role.NONE


def test_argument_nodes_opens_lists_but_not_slices():
    graph = fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    node = graph.call_function(torch.cat, ([x, (y, 1)], slice(z, None)), {"out": z})
    assert list(argument_nodes(node)) == [x, y, z]
