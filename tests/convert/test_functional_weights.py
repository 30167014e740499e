"""Weights of functional operators become integers, however they are computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backquant.calibrate import calibrate
from backquant.convert import convert_to_reference
from backquant.observe import MinMaxObserver
from backquant.qconfig import QConfig, QConfigMapping, default_dynamic_qconfig


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.other = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4, 1), 0.5))


class Plain(Base):
    def forward(self, x):
        return F.linear(x, self.weight)


class Computed(Base):
    def forward(self, x):
        return F.linear(x, (self.weight * self.scale).t().contiguous())


class ByKeyword(Base):
    def forward(self, x):
        return F.linear(x, weight=self.weight, bias=self.other.bias)


class TwoUses(Base):
    def forward(self, x):
        return F.linear(F.linear(x, self.weight), self.weight)


def _convert(flow, model, x, mapping=None, dialect="decomposed"):
    prepared = flow.prepare(model, mapping)
    calibrate(prepared, [x])
    return convert_to_reference(prepared, dialect=dialect)


@pytest.mark.parametrize("model", [Plain, ByKeyword, TwoUses], ids=lambda cls: cls.__name__)
def test_stored_as_integers(flow, model):
    model, x = model().eval(), torch.randn(3, 4)
    converted = _convert(flow, model, x)
    state = converted.state_dict()
    assert "weight" not in state
    assert state["weight_quantized_0"].dtype == torch.int8
    assert "quantize_per_channel.default(weight" not in converted.code.replace("dequantize", "")
    restored = state["weight_quantized_0"] * state["weight_scale_0"][:, None]
    kept = _convert(flow, model, x, dialect="quantized_tensor").state_dict()
    assert torch.equal(state["weight_scale_0"], kept["_scale_0"])
    assert torch.allclose(restored, model.weight, atol=float(state["weight_scale_0"].max()))


def test_a_computed_weight_is_computed_once(flow):
    """Its operators are quantized, too, so the constant is what they give in float."""
    mapping = flow.mapping()
    for target in (torch.mul, "t", "contiguous"):
        mapping.set_object_type(target, None)
    import operator

    mapping.set_object_type(operator.mul, None)
    model, x = Computed().eval(), torch.randn(3, 4)
    converted = _convert(flow, model, x, mapping)
    assert "scale = self.scale" not in converted.code
    [name] = [n for n, b in converted.named_buffers() if b.dtype == torch.int8]
    scale = converted.state_dict()[name.replace("quantized", "scale")]
    restored = getattr(converted, name) * scale[:, None]
    assert torch.allclose(restored, (model.weight * 0.5).t(), atol=float(scale.max()))


def test_a_weight_that_depends_on_an_input_stays_an_activation(flow):
    class Dependent(Base):
        def forward(self, x):
            return F.linear(x, torch.sin(x))

    converted = _convert(flow, Dependent().eval(), torch.randn(4, 4))
    assert "quantize_per_channel_default = " in converted.code
    assert not [n for n, b in converted.named_buffers() if b.dtype == torch.int8]


def test_per_tensor_weights_have_literal_qparams(flow):
    weight = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    mapping = flow.mapping().set_object_type(
        F.linear, QConfig(MinMaxObserver.with_args(reduce_range=True), weight)
    )
    converted = _convert(flow, Plain().eval(), torch.randn(3, 4), mapping)
    [name] = [n for n, b in converted.named_buffers() if b.dtype == torch.int8]
    op = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    [node] = [n for n in converted.graph.nodes if n.target is op and n.args[0].target == name]
    assert node.args[2] == 0


def test_dynamic_weights_need_no_calibration(flow):
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    model, x = Plain().eval(), torch.randn(3, 4)
    converted = convert_to_reference(flow.prepare(model, mapping))
    assert [b.dtype for b in converted.buffers() if b.dim() == 2] == [torch.int8]
    assert torch.allclose(converted(x), model(x), atol=0.1)
