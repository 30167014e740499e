"""Int8 activations run on engines whose kernels take uint8, and give what the reference model gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant import QConfig, QConfigMapping
from backquant.lower.qdq import is_quantize, qparams_of
from backquant.observe import MinMaxObserver
from backquant.qconfig import default_symmetric_qnnpack_qconfig


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.act, self.pool = nn.Hardswish(), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.cat([x + self.act(self.depthwise(x)), x], 1)[:, :8]
        return torch.sigmoid(self.head(torch.flatten(self.pool(x), 1)))


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3, 8, 8)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("engine", ["x86", "onednn", "fbgemm", "qnnpack"])
def test_signed_activations_on_every_engine(engine: str, symmetric: bool, x: torch.Tensor) -> None:
    scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
    activation = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=scheme, eps=2**-12)
    qconfig = QConfig(activation, default_symmetric_qnnpack_qconfig.weight)
    config = backquant.backend_config.get_qnnpack_backend_config().set_engine(engine)
    mapping = QConfigMapping().set_global(qconfig)
    prepared = backquant.prepare_fx(Net().eval(), mapping, (x,), backend_config=config)
    prepared(x)
    reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    quantized = backquant.convert_fx(prepared)
    assert any(is_quantize(n) and qparams_of(n).dtype == torch.int8 for n in reference.graph.nodes)
    assert quantized.left_in_float == ()
    expected = reference(x)
    last = [n for n in reference.graph.nodes if is_quantize(n)][-1]
    assert (quantized(x) - expected).abs().max() <= 1.01 * qparams_of(last).scale


def test_a_quantized_output_keeps_its_dtype(x: torch.Tensor) -> None:
    config = backquant.backend_config.get_qnnpack_backend_config()
    mapping = QConfigMapping().set_global(default_symmetric_qnnpack_qconfig)
    custom = backquant.PrepareCustomConfig().set_output_quantized_indexes([0])
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    prepared = backquant.prepare_fx(model, mapping, (x[0, 0],), custom, backend_config=config)
    prepared(x[0, 0])
    assert backquant.convert_fx(prepared)(x[0, 0]).dtype == torch.int8
