"""Batches that are computed sample by sample."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import backquant
from backquant.operators.samples import Mixed
from backquant.runtime.replay import Replays
from backquant.runtime.replay.in_parts import Called, InParts, in_parts
from backquant.runtime.replay.program import Program
from backquant.runtime.replay.record import Arguments, Recording, known_constants, record
from backquant.runtime.replay.replays import Fastest
from backquant.runtime.replay.shortened import shortened


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def parts_of(model: nn.Module, *args: Any, **kwargs: Any) -> list[InParts]:
    constants = partial(known_constants, model)
    result, recording = record(model, args, kwargs, constants)
    assert isinstance(recording, Recording)
    tensors = Arguments(args, kwargs).tensors
    called = Called(model, args, kwargs, tensors, constants, result)
    return in_parts(recording, Program(shortened(recording)), called)


class Named(NamedTuple):
    rows: torch.Tensor
    scale: torch.Tensor


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))

    def forward(self, x: torch.Tensor, *, y: dict[str, torch.Tensor]) -> Any:
        rows = (x * self.scale + y["bias"]).relu()
        return {
            "named": Named(rows.transpose(0, 1), self.scale * 2),
            "rest": [rows[:, 1], 7, None],
        }


def test_all_tensors_of_arguments_and_results() -> None:
    model = Several()
    x, y = torch.randn(5, 3), {"bias": torch.randn(3)}
    with torch.no_grad():
        (parts,) = parts_of(model, x, y=y)
        x = torch.randn(5, 3)
        expected, found = model(x, y=y), parts([x, y["bias"]])
    assert isinstance(found["named"], Named)
    assert found["rest"][1:] == [7, None]
    for one, other in zip(
        (*expected["named"], expected["rest"][0]), (*found["named"], found["rest"][0]), strict=True
    ):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    held = found["named"].scale
    held.zero_()  # no memory of the program
    with torch.no_grad():
        assert torch.equal(parts([x, y["bias"]])["named"].scale, model.scale * 2)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + 1


class Averaging(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.flip(0)


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1).relu_().view(x.shape) + 1


class OfOneSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(4, 3) + 1


class OneLess(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return (x + 1,) if x.size(0) > 1 else x + 1


@pytest.mark.parametrize(
    ("model", "rows", "reason"),
    [
        (Counting(), 4, "writes into what the model is given, or holds"),
        (Averaging(), 4, "over samples"),
        (InPlace(), 4, "writes into what the model is given, or holds"),
        (OneLess(), 3, "gives another result"),
        (nn.ReLU(), 1, "there is one sample"),
        (nn.ReLU(), 513, "there are more than 256 samples"),
    ],
)
def test_what_is_computed_as_a_whole(model: nn.Module, rows: int, reason: str) -> None:
    x = torch.randn(rows, 3)
    before = x.clone(), [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad(), pytest.raises(Mixed, match=reason):
        parts_of(model, x)
    assert isinstance(model, InPlace) or torch.equal(x, before[0])
    assert [float(b) for b in model.buffers()] == [float(b) + 1 for b in before[1]]


@pytest.mark.parametrize(
    ("rows", "threads", "sizes"),
    [(8, 2, [1, 4]), (2, 2, [1]), (7, 2, [1]), (8, 1, [1]), (6, 3, [1, 2]), (512, 2, [256])],
)
def test_parts_are_single_samples_and_the_share_of_a_thread(
    rows: int, threads: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = torch.randn(rows, 3)
    with torch.no_grad():
        found = parts_of(nn.ReLU(), x)
        assert [parts.rows for parts in found] == sizes
        assert all(torch.equal(parts([x]), x.relu()) for parts in found)


class TimesItsNumber(nn.Module):
    """What a recording does not show: the number of samples as a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.size(0)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (TimesItsNumber(), "called with 4 for all samples"),
        (OfOneSize(), "invalid for input of size 3"),
    ],
)
def test_a_model_that_knows_the_number_of_its_samples_is_computed_as_a_whole(
    model: nn.Module, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    replays = Replays(torch.fx.symbolic_trace(model))
    x = torch.randn(4, 3)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(replays(x), model(x))
    assert replays.programs == 1
    assert reason in replays.together
    assert capfd.readouterr() == ("", "")  # torch.fx tells of errors in graphs


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "name",
    ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "regnet_y_400mf"],
)
@pytest.mark.parametrize(("rows", "ways"), [(5, 1), (6, 2)])
def test_stock_models_give_the_same_bits(name: str, rows: int, ways: int, inference: bool) -> None:
    import benchmarks.stock  # noqa: F401 - imports torchvision
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(weights=None).eval()
    x = torch.randn(rows, 3, 64, 64)
    quantized = backquant.quantize(model, calibration=[(x,)], backend="x86", slower="keep")
    with torch.inference_mode(inference):
        for _ in range(3):
            quantized(x)
        y = torch.randn(rows, 3, 64, 64)
        for _ in range(12):
            assert torch.equal(quantized(y), quantized.graph_module(y))
        (kept,) = quantized.replays._found.values()
        if name != "shufflenet_v2_x0_5" and quantized.replays.together:
            # on some CPUs: an addition, or a mean, by PyTorch's kernels
            assert "may give other bits in another batch" in quantized.replays.together
            assert not isinstance(kept.program, Fastest)
            return
        assert isinstance(kept.program, Fastest)
        whole, *parts = (way([y]) for way in kept.program.ways)
        assert len(parts) == ways
        for found in parts:
            assert torch.equal(whole, found)
            assert whole.stride() == found.stride()
