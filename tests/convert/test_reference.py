"""Prepared graphs, qparams, weights, converted graphs and outputs, bit for bit with PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx
from torch.ao.quantization.quantize_fx import (
    _convert_to_reference_decomposed_fx,
    convert_to_reference_fx,
)

from backquant.calibrate import calibrate
from backquant.convert import convert_to_reference, reference_state
from backquant.prepare import prepared_state

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")

_TORCH = {
    "decomposed": _convert_to_reference_decomposed_fx,
    "quantized_tensor": convert_to_reference_fx,
}


def _observers(prepared: fx.GraphModule) -> list[tuple[str, str, str]]:
    """(observer, the first of those it shares its instance with, its class), in graph order."""
    names = [str(n.target) for n in prepared.graph.nodes if n.op == "call_module"]
    names = [name for name in names if name.startswith("activation_post_process")]
    first: dict[int, str] = {}
    modules = [(name, getattr(prepared, name)) for name in names]
    return [(name, first.setdefault(id(m), name), type(m).__name__) for name, m in modules]


def _outputs(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("dialect", list(_TORCH))
def test_equal_to_torch(flow, zoo_name, dialect):
    model, batches = flow.model(zoo_name)
    theirs = flow.torch_prepare(copy.deepcopy(model), batches[0])
    ours = flow.prepare(model)
    assert ours.code == theirs.code
    assert _observers(ours) == _observers(theirs)

    calibrate(ours, batches[:3])
    with torch.no_grad():
        for batch in batches[:3]:
            theirs(batch)
    expected = _TORCH[dialect](theirs, backend_config=flow.torch_backend())
    converted = convert_to_reference(ours, dialect=dialect)

    if (zoo_name, dialect) == ("functional", "decomposed"):
        # Weights of functional operators: integers here, floats that are quantized there.
        assert "quantize_per_channel_default = " not in converted.code.replace("dequantize", "")
        assert _activation_qparams(converted) == _activation_qparams(expected)
    else:
        assert converted.code == expected.code
    _compare_weights(converted, expected)
    with torch.no_grad():
        for batch in batches:
            pairs = zip(_outputs(converted(batch)), _outputs(expected(batch)), strict=True)
            assert all(torch.equal(one, two) for one, two in pairs)


def _activation_qparams(module: fx.GraphModule) -> list[tuple]:
    op = torch.ops.quantized_decomposed.quantize_per_tensor.default
    return [node.args[1:] for node in module.graph.nodes if node.target is op]


def _compare_weights(converted: fx.GraphModule, expected: fx.GraphModule) -> None:
    ours = dict(converted.named_modules())
    compared = 0
    for path, module in expected.named_modules():
        if hasattr(module, "weight_scale"):
            assert torch.equal(ours[path].weight_scale, module.weight_scale)
            assert torch.equal(ours[path].get_weight(), module.get_weight())
            assert ours[path].weight.dtype == torch.int8
            compared += 1
    assert compared or "linear" in converted.code


def test_the_large_model_has_50_operators(flow):
    model, _ = flow.model("over_50_operators_at_224")
    state = prepared_state(flow.prepare(model))
    assert sum(decision.quantized for decision in state.plan.decisions.values()) >= 50


def test_buffers_of_the_quantized_tensor_dialect(flow):
    model, batches = flow.model("residual")
    theirs = flow.torch_prepare(copy.deepcopy(model), batches[0])
    ours = flow.prepare(model)
    calibrate(ours, batches)
    with torch.no_grad():
        for batch in batches:
            theirs(batch)
    expected = convert_to_reference_fx(theirs, backend_config=flow.torch_backend())
    converted = convert_to_reference(ours, dialect="quantized_tensor")
    state = converted.state_dict()
    shared = {k: v for k, v in expected.state_dict().items() if "post_process" not in k}
    names = [n for n in shared if n.startswith(("_scale", "_zero_point")) or "_scale_0" in n]
    assert names
    for name in names:
        assert torch.equal(state[name], shared[name])
        assert state[name].dtype == shared[name].dtype
    assert reference_state(converted).dialect == "quantized_tensor"
