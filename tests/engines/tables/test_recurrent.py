from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant.qconfig as bq
from backquant.backend_config import BackendConfig, DTypeConfig, get_backend_config
from backquant.observe import MinMaxObserver, PlaceholderObserver
from backquant.operators import recurrent
from backquant.runtime import audit

DYNAMIC = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig)


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 5)

    def forward(self, x, h):
        return self.gru(x, hx=h)


class Unpacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5)

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        return y[-1] + h[0] + c[0]


@pytest.mark.parametrize("layer", [nn.LSTM(4, 5), nn.GRU(4, 5, 2, bidirectional=True)])
def test_a_layer_becomes_one_kernel(flow, layer):
    x = torch.randn(6, 2, 4)
    with torch.no_grad():
        reference, lowered = flow(Layer(layer), (x,), DYNAMIC, "x86")
        assert torch.allclose(lowered.graph_module(x), reference(x), atol=0.05)
    [use] = lowered.kernels
    assert use.nodes == ("layer",)
    assert lowered.left_in_float == ()
    assert audit(lowered.graph_module).kernels == {use.kernel: 1}
    assert audit(reference).float_weighted == ("layer",)


def test_a_state_by_keyword(flow):
    example = torch.randn(6, 2, 4), torch.randn(1, 2, 5)
    with torch.no_grad():
        reference, lowered = flow(Keyword(), example, DYNAMIC, "qnnpack")
        pairs = zip(lowered.graph_module(*example), reference(*example), strict=True)
        assert all(torch.allclose(a, b, atol=0.05) for a, b in pairs)
    assert len(lowered.kernels) == 1


def test_taking_the_tuple_apart_is_no_operator(flow):
    x = torch.randn(6, 2, 4)
    with torch.no_grad():
        reference, lowered = flow(Unpacked(), (x,), DYNAMIC, "fbgemm")
        assert torch.allclose(lowered.graph_module(x), reference(x), atol=0.05)
    rest = {reason.node for reason in lowered.left_in_float}
    assert {name for name in rest if not name.startswith("add")} <= {
        "getitem_4",  # y[-1], h[0], c[0] index tensors
        "getitem_5",
        "getitem_6",
    }
    assert not rest & {"getitem", "getitem_1", "getitem_2", "getitem_3"}


def test_weights_are_shared_with_the_reference_not_copied(flow):
    reference, lowered = flow(Layer(nn.LSTM(4, 5)), (torch.randn(6, 2, 4),), DYNAMIC, "fbgemm")
    ours, theirs = lowered.graph_module.get_submodule("layer"), reference.get_submodule("layer")
    assert ours.weight_ih_l0.data_ptr() == theirs.weight_ih_l0.data_ptr()
    assert ours.bias_hh_l0.data_ptr() == theirs.bias_hh_l0.data_ptr()


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_what_is_refused(flow):
    x = torch.randn(6, 2, 4)
    projected = Layer(nn.LSTM(4, 5, proj_size=3))
    with torch.no_grad():
        reference, lowered = flow(projected, (x,), DYNAMIC, "fbgemm")
        assert torch.equal(lowered.graph_module(x), reference(x))
    assert [r.rule for r in lowered.left_in_float] == ["proj-size"]
    affine = bq.QConfig(
        bq.default_dynamic_qconfig.activation, MinMaxObserver.with_args(dtype=torch.qint8)
    )
    mapping = bq.QConfigMapping().set_global(affine)
    layer = Layer(nn.LSTM(4, 5))
    layer.layer.weight_hh_l0.data += 1
    _, lowered = flow(layer, (x,), mapping, "onednn")
    assert [r.rule for r in lowered.left_in_float] == ["weight-zero-point"]
    _, lowered = flow(layer, (x,), mapping, "fbgemm")
    assert len(lowered.kernels) == 1
    half = bq.QConfigMapping().set_global(bq.float16_dynamic_qconfig)
    fbgemm = get_backend_config("fbgemm")
    _, lowered = flow(Layer(nn.GRU(4, 5)), (x,), half, "qnnpack", fbgemm)
    [reason] = lowered.left_in_float
    assert (reason.rule, reason.asked) == ("no-kernel", "a kernel for float16 weights")


def test_dropout_in_training_mode_is_refused(flow):
    reference, _ = flow(
        Layer(nn.LSTM(4, 5, 2, dropout=0.5)), (torch.randn(6, 2, 4),), DYNAMIC, "x86"
    )
    from backquant.lower import engine_info, find_engine, lower

    reference.get_submodule("layer").train()
    lowered = lower(reference, find_engine("x86").rules(), engine_info("x86"))
    assert [r.rule for r in lowered.left_in_float] == ["training"]


def test_integer_weights_with_a_float_input_have_no_kernel(flow):
    config = DTypeConfig(torch.float, torch.float, torch.qint8, torch.float)
    backend = BackendConfig("custom").set_backend_pattern_configs(recurrent.entries([config]))
    asked = bq.QConfig(PlaceholderObserver, bq.default_dynamic_qconfig.weight)
    mapping = bq.QConfigMapping().set_global(asked)
    x = torch.randn(6, 2, 4)
    with torch.no_grad():
        reference, lowered = flow(Layer(nn.LSTM(4, 5)), (x,), mapping, "fbgemm", backend)
        assert torch.equal(lowered.graph_module(x), reference(x))
    [reason] = lowered.left_in_float
    assert (reason.rule, reason.asked) == ("dtypes", "weight int8, input float32")
