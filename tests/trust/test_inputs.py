"""Inputs that a model was not made for: computed as the float model would, or an error of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import benchmarks.stock  # noqa: F401 - makes torchvision importable
import pytest
import torch
from torch import nn
from torchvision.models import resnet18

import backquant
from backquant import QConfigMapping, default_dynamic_qconfig
from backquant.errors import BackquantError, InputError

pytestmark = pytest.mark.xdist_group("inputs")  # one worker pays for what they share

ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


def image() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """ResNet-18 on each engine, and as a reference model."""
    torch.manual_seed(0)
    model = resnet18().eval()
    return {
        backend: backquant.quantize(model, image(), backend=backend, calibration=[image()])
        for backend in (*ENGINES, "tensorrt")
    }


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float64": lambda x: x.double(),
    "int64": lambda x: x.long(),
    "uint8": lambda x: x.byte(),
    "bool": lambda x: x > 0,
    "complex64": lambda x: x + 0j,
    "two dimensions": lambda x: x[0, 0],
    "five dimensions": lambda x: x[None],
    "two channels": lambda x: x[:, :2],
    "four channels": lambda x: x[:, [0, 1, 2, 0]],
    "no channels": lambda x: x[:, :0],
    "on meta": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_float_model_refuses_is_refused(engine: str, kind: str, models: Any) -> None:
    with pytest.raises(InputError) as caught:
        models[engine](REFUSED[kind](image()))
    assert caught.value.what and caught.value.where


TAKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "without a batch": lambda x: x[0],
    "transposed": lambda x: x.transpose(2, 3),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand(3, 3, 32, 32),
    "with gaps": lambda x: torch.cat([x, x], 3)[..., ::2],
    "an empty batch": lambda x: x[:0],
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "outliers": lambda x: x * 1e30,
    "denormals": lambda x: x * 1e-40,
}


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("engine", ENGINES)
def test_layouts_and_ranges_change_nothing(engine: str, kind: str, models: Any) -> None:
    """The same values, laid out as new, give the same result; those beyond the range saturate."""
    if kind == "without a batch":
        with pytest.raises(BackquantError):
            models[engine](image()[0])  # flatten(1) needs one in float, too
        return
    x = TAKEN[kind](image())
    as_new = x.float().clone(memory_format=torch.contiguous_format)
    got, wanted = models[engine](x), models[engine](as_new)
    assert torch.equal(got, wanted) and bool(got.isfinite().all())


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("engine", ENGINES)
def test_values_that_are_not_finite_stay_within_the_range(
    engine: str, value: float, models: Any
) -> None:
    """Quantized, infinities are the ends of the range, and NaN some number in it: never other memory."""
    x = image()
    x[0, 0, 0, :5] = value
    limits = [x.nan_to_num(end, end, -end) for end in (0.0, 1e30, -1e30)]
    got = models[engine](x)
    assert bool(got.isfinite().all())
    assert torch.equal(got, models[engine](x))
    assert torch.equal(got[1], models[engine](limits[0])[1])  # the other image


@pytest.mark.parametrize("engine", ["fbgemm", "qnnpack"])
def test_dynamic_layers_take_floats_of_their_width(engine: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model = backquant.quantize(
        layer,
        torch.randn(2, 5, 16),
        backend=engine,
        qconfig_mapping=QConfigMapping().set_global(default_dynamic_qconfig),
    )
    for x in (torch.randn(2, 5, 15), torch.randn(2, 5, 16).double(), torch.ones(2, 5, 16).long()):
        with pytest.raises(InputError):
            model(x)
