"""Whole models, from calibration to kernels, beside torch's ``convert_fx`` on the same engine."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.ao.quantization as tq
from torch import nn
from torch.ao.quantization.backend_config import (
    get_fbgemm_backend_config,
    get_onednn_backend_config,
    get_qnnpack_backend_config,
)
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config
from torch.ao.quantization.observer import FixedQParamsObserver as TorchFixed
from torch.ao.quantization.observer import MinMaxObserver as TorchMinMax
from torch.ao.quantization.observer import PerChannelMinMaxObserver as TorchPerChannel
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.nn import functional as F

from backquant.backend_config import get_backend_config
from backquant.calibrate import calibrate
from backquant.convert import convert_to_reference
from backquant.engines import onednn
from backquant.fuse import apply_fusion
from backquant.graph import capture
from backquant.lower import engine_info, find_engine, lower
from backquant.match import make_plan, plan_fusion
from backquant.observe import FixedQParamsObserver, MinMaxObserver, PerChannelMinMaxObserver
from backquant.prepare import Record, insert_observers
from backquant.qconfig import QConfig, QConfigMapping
from backquant.runtime import audit

ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")
TORCH_BACKENDS = {
    "x86": get_x86_backend_config,
    "onednn": get_onednn_backend_config,
    "fbgemm": get_fbgemm_backend_config,
    "qnnpack": get_qnnpack_backend_config,
}
pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.one = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))
        self.three = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.fc = nn.Linear(32, 7)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        x = F.relu(self.two(self.one(x)) + x)
        x = torch.cat([x, self.three(x)], 1)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.squeeze = nn.Conv2d(8, 4, 1)
        self.excite = nn.Conv2d(4, 8, 1)
        self.down = nn.AvgPool2d(2)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = F.hardswish(self.conv(x))
        gate = F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))
        x = self.down(x * torch.sigmoid(self.excite(gate)))
        return self.fc(x.mean([2, 3]))


def _settle(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model.eval()


def _ours(model, engine, batches):
    backend = get_backend_config(engine)
    weight = PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    )
    observer = MinMaxObserver.with_args(reduce_range=engine == "fbgemm")
    fixed = FixedQParamsObserver.with_args(scale=1 / 256, zero_point=0)
    mapping = QConfigMapping().set_global(QConfig(observer, weight))
    mapping.set_object_type(torch.sigmoid, QConfig(fixed, weight))
    captured = capture(copy.deepcopy(model))
    fusions = plan_fusion(captured.module, backend)
    fused = apply_fusion(captured.module, captured.scopes, fusions, backend, False)
    planned = make_plan(fused.module, fused.scopes, backend, mapping, fusions=fusions)
    prepared = insert_observers(
        fused.module,
        Record(planned, backend, mapping, scopes=fused.scopes, provenance=fused.provenance),
    )
    calibrate(prepared, batches)
    reference = convert_to_reference(prepared)
    return reference, lower(reference, find_engine(engine).rules(), engine_info(engine))


def _theirs(model, engine, batches):
    weight = TorchPerChannel.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    )
    observer = TorchMinMax.with_args(reduce_range=engine == "fbgemm")
    fixed = TorchFixed.with_args(scale=1 / 256, zero_point=0)
    mapping = tq.QConfigMapping().set_global(tq.QConfig(observer, weight))
    mapping.set_object_type(torch.sigmoid, tq.QConfig(fixed, weight))
    backend = TORCH_BACKENDS[engine]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(copy.deepcopy(model), mapping, (batches[0],), backend_config=backend)
        with torch.no_grad():
            for batch in batches:
                prepared(batch)
        return convert_fx(prepared, backend_config=backend)


@pytest.fixture
def engine(request):
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = request.param
    yield request.param
    torch.backends.quantized.engine = before


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("make", [Residual, Gated])
def test_lowered_models_agree_with_the_reference_and_with_torch(engine, make):
    model = _settle(make())
    batches = [torch.randn(4, 3, 24, 24) for _ in range(3)]
    reference, lowered = _ours(model, engine, batches)
    theirs = _theirs(model, engine, batches)
    assert lowered.left_in_float == ()
    found = audit(lowered.graph_module)
    assert (found.float_weighted, found.quantize, found.dequantize) == ((), 1, 1)
    assert found.joined == ()
    last = reference.graph.output_node().args[0]
    step = last.args[1]
    exact = 0
    with torch.no_grad():
        for batch in [*batches, torch.randn(1, 3, 20, 28)]:
            ours, expected, other = lowered.graph_module(batch), reference(batch), theirs(batch)
            assert (ours - expected).abs().max() <= 2.001 * step
            assert (ours - other).abs().max() <= 2.001 * step
            exact += int(torch.equal(ours, other))
    if make is Residual and engine == "qnnpack":
        assert exact == 4  # the same kernels run


def test_the_default_float_path_is_not_taken_silently():
    """A model of which half is excluded: the float half is listed, the rest runs on integers."""
    model = _settle(Residual())
    backend = get_backend_config("x86")
    weight = PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric
    )
    mapping = (
        QConfigMapping()
        .set_global(QConfig(MinMaxObserver, weight))
        .set_module_name("two", None)
        .set_module_name("fc", None)
    )
    captured = capture(model)
    fusions = plan_fusion(captured.module, backend)
    fused = apply_fusion(captured.module, captured.scopes, fusions, backend, False)
    planned = make_plan(fused.module, fused.scopes, backend, mapping, fusions=fusions)
    prepared = insert_observers(
        fused.module,
        Record(planned, backend, mapping, scopes=fused.scopes, provenance=fused.provenance),
    )
    batch = torch.randn(2, 3, 16, 16)
    calibrate(prepared, [batch])
    reference = convert_to_reference(prepared)
    lowered = lower(reference, onednn.X86.rules(), engine_info("x86"))
    assert {"two_0", "fc"} <= {reason.node for reason in lowered.left_in_float}
    assert set(audit(lowered.graph_module).float_weighted) == {"two_0", "fc"}
    assert torch.allclose(lowered.graph_module(batch), reference(batch), atol=0.05)
