"""``torch.compile`` of quantized models by users."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import backquant
from backquant.errors import InputError
from backquant.runtime import QuantizedModel

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns of torch


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        return self.head((F.relu(self.second(x) + x)).mean((2, 3)))


CALIBRATION = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]


def quantized(backend: str) -> QuantizedModel:
    torch.manual_seed(0)
    return backquant.quantize(Residual().eval(), backend=backend, calibration=CALIBRATION)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with inductor_config.patch({"freezing": True}):
        yield
    torch._dynamo.reset()


def test_a_lowered_model_runs_as_it_is_within_compiled_code() -> None:
    model = quantized("x86")

    @torch.compile
    def around(x: torch.Tensor) -> torch.Tensor:
        return model(x * 2) + 1

    x = CALIBRATION[0] / 2
    with torch.no_grad():
        assert torch.allclose(around(x), model(x * 2) + 1)
        assert sum(counters["graph_break"].values()) <= 4  # at the model, whatever is in it
        assert torch.allclose(around(x), model(x * 2) + 1)
        with pytest.raises(InputError, match="NaN"):
            around(x * torch.nan)


def test_a_reference_model_becomes_integer_kernels() -> None:
    model = quantized("inductor_x86")
    x = CALIBRATION[0]
    with torch.no_grad():
        found, codes = run_and_get_code(torch.compile(model, fullgraph=True), x)
        assert torch.allclose(found, model(x), atol=1e-3)
    code = "".join(codes)
    assert code.count("= torch.ops.onednn.qconv_pointwise.tensor(") == 1
    assert "torch.ops.onednn.qconv2d_pointwise.binary_tensor(" in code
    assert "torch.ops.onednn.qlinear_pointwise.tensor(" in code
    assert "mkldnn._convolution_pointwise" not in code
