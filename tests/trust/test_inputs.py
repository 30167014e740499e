"""Inputs that a model was not made for: computed as the float model would, or an error of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
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
REFERENCE = backquant.get_backend_config("x86").set_engine(None)
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
@pytest.mark.parametrize("engine", (*ENGINES, "tensorrt"))
def test_values_that_are_not_finite(engine: str, value: float, models: Any) -> None:
    """Refused. Where the user wants them taken, infinities are the ends of the range, and NaN some number in
    it: never other memory."""
    x, model = image(), copy.deepcopy(models[engine])
    x[0, 0, 0, :5] = value
    limits = [x.nan_to_num(end, end, -end) for end in (0.0, 1e30, -1e30)]
    for _ in range(3):  # interpreted, recorded, replayed
        with pytest.raises(InputError, match=r"input 'x' holds 5 NaN|0 NaN and 5 infinite"):
            model(x)
        model(image())
    model.check_finite = False
    got = model(x)
    assert bool(got.isfinite().all())
    assert torch.equal(got, model(x))
    assert torch.equal(got[1], model(limits[0])[1])  # the other image


def test_finite_values_whose_sum_is_not_are_taken(models: Any) -> None:
    models["x86"](torch.full((1, 3, 32, 32), 3e38))
    models["x86"](torch.full((1, 3, 32, 32), 6e4).half())


class Parts(nn.Module):
    """An input that floats prepare, one within a dict, and a mask that is added in float."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.other, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(2))

    def forward(self, x: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        y = self.image(((x - self.mean) / 2.0).flatten(1)) + self.other(parts["other"])
        return self.last(y).softmax(-1), (y + parts["mask"]).softmax(-1)


def parts(qconfig: Any, backend: Any) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    x, others = torch.randn(2, 2, 2), {"other": torch.randn(2, 4), "mask": torch.zeros(4)}
    mapping = None if qconfig is None else QConfigMapping().set_global(qconfig)
    data = [(x, others)] if qconfig is None else None
    made = backquant.quantize(
        Parts().eval(),
        (x, others),
        backend=backend,
        calibration=data,
        qconfig_mapping=mapping,
        slower="keep",
    )
    return made, x, others


@pytest.mark.parametrize(
    ("backend", "qconfig"),
    [("x86", None), (REFERENCE, None), ("x86", default_dynamic_qconfig)],
    ids=["x86", "reference", "dynamic"],
)
def test_an_input_counts_where_it_is_quantized(backend: str, qconfig: Any, tmp_path: Path) -> None:
    """… and a mask that is added in float does not. The switch is kept in the file and by a copy."""
    model, x, others = parts(qconfig, backend)
    backquant.save(model, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    masked, nan = (
        others | {"mask": torch.tensor([0, 0, 0, -torch.inf])},
        torch.full((2, 2, 2), torch.nan),
    )
    for made in (model, loaded, copy.deepcopy(model)):
        assert bool((made(x, masked)[1][:, 3] == 0).all())
        with pytest.raises(InputError, match="input 'x' holds 8 NaN"):
            made(nan, others)
        with pytest.raises(InputError, match=r"input \"parts\['other'\]\" holds 4 NaN"):
            made(x=x, parts=others | {"other": nan[0]})
    loaded.check_finite = False
    backquant.save(loaded, tmp_path / "unchecked.bq")
    for made in (loaded, backquant.load(tmp_path / "unchecked.bq"), copy.deepcopy(loaded)):
        if qconfig is None:  # the dynamic kernel has a refusal of its own
            made(nan, others)


@pytest.mark.parametrize("bytes_left", [0, 4 * 3 * 32 * 32])
def test_tensors_beyond_their_storage_are_refused(bytes_left: int, models: Any) -> None:
    """They ended the process."""
    for backend in ("x86", "tensorrt"):
        for x in (image(), image()[1:], image().transpose(2, 3), image().long()):
            x.untyped_storage().resize_(bytes_left)
            with pytest.raises(InputError, match="reaches beyond its storage"):
                models[backend](x)
        empty = image()[:0]
        empty.untyped_storage().resize_(0)
        models[backend](empty)


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
