"""Models on another device than the CPU: what a GPU refuses, ``tests/other_device.py`` refuses, too.

Run by ``test_flows.py`` in a process of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import backquant
from backquant.calibrate import packed
from backquant.errors import InputError
from backquant.graph.devices import devices_of, on_cpu
from other_device import ELSEWHERE, Elsewhere, other_device


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The other device computes with eager kernels, and so the CPU does here: packed ones have other bits."""
    monkeypatch.setattr(packed, "_usable", lambda: False)
    with other_device():
        yield


class Net(nn.Module):
    """Convolutions (one in groups), an embedding, a residual addition, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Hardswish())
        self.fc = nn.Linear(8, 4)
        self.shift = torch.zeros(4)  # no buffer: ``to`` leaves it where it is

    def there(self) -> Net:
        moved = self.to(ELSEWHERE)
        moved.shift = moved.shift.to(ELSEWHERE)
        return moved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.deep(x)
        x = self.fc(x.mean((2, 3)) * torch.arange(1.0, 9.0, device=x.device))
        return x + self.shift


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 3, 16, 16) for _ in range(2)]


def there(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value.to(ELSEWHERE) for value in values]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        ("tensorrt", "default"),
        ("tensorrt_fp8", "default"),
        ("onnxruntime", "better"),
        ("tensorrt", "best"),
    ],
)
def test_a_reference_model_stays_there_and_computes_the_same(backend: str, recipe: str) -> None:
    model, data = Net().eval(), batches()
    here = backquant.quantize(
        model, backend=backend, calibration=data, recipe=recipe, slower="keep"
    )
    moved = copy.deepcopy(model).there()
    made = backquant.quantize(
        moved, backend=backend, calibration=there(data), recipe=recipe, slower="keep"
    )
    assert devices_of(made) == {ELSEWHERE}
    assert same(made(data[0].to(ELSEWHERE)), here(data[0]))


@pytest.mark.parametrize(
    "observer", ["HistogramObserver", "MinMaxObserver", "MovingAverageMinMaxObserver"]
)
def test_observers_measure_the_same(observer: str) -> None:
    from backquant import observe

    kind = getattr(observe, observer)
    here, moved = kind(), kind().to(ELSEWHERE)
    for batch in batches():
        here(batch)
        moved(batch.to(ELSEWHERE))
    for one, other in zip(here.calculate_qparams(), moved.calculate_qparams(), strict=True):
        assert same(one, other)


def test_kernels_run_on_the_cpu_whatever_device_was_calibrated_on() -> None:
    model, data = Net().eval(), batches()
    moved = copy.deepcopy(model).there()
    before = {name: id(tensor) for name, tensor in moved.state_dict(keep_vars=True).items()}
    made = backquant.quantize(moved, backend="x86", calibration=there(data), slower="keep")
    assert devices_of(made) <= {torch.device("cpu")}
    here = backquant.quantize(model, backend="x86", calibration=data, slower="keep")
    assert same(made(data[0]), here(data[0]))
    assert {n: id(t) for n, t in moved.state_dict(keep_vars=True).items()} == before
    assert devices_of(moved) == {ELSEWHERE}


def test_the_race_against_float_is_run_on_the_cpu() -> None:
    moved = Net().eval().there()
    made = backquant.quantize(moved, backend="x86", calibration=there(batches()))
    assert made(batches()[0]).device.type == "cpu"


def test_a_call_with_an_input_of_another_device_says_so() -> None:
    made = backquant.quantize(Net().eval(), backend="x86", calibration=batches(), slower="keep")
    with pytest.raises(
        InputError, match="an input is on elsewhere:0, and the model's kernels"
    ) as told:
        made(batches()[0].to(ELSEWHERE))
    assert told.value.fix == "quantized(x.cpu())"


@pytest.mark.parametrize(("model", "data"), [(there, list), (list, there)])
def test_batches_of_another_device_are_named(
    model: Callable[..., list[torch.Tensor]], data: Callable[..., list[torch.Tensor]]
) -> None:
    net = Net().eval()
    net, example = (net.there(), there(batches())[0]) if model is there else (net, batches()[0])
    own, given = (ELSEWHERE, "cpu") if model is there else ("cpu", ELSEWHERE)
    with pytest.raises(InputError) as told:
        backquant.quantize(net, backend="tensorrt", calibration=data(batches()))
    advice = f"tensors on {own}, where the model is, not on {given}: x.to('{own}')"
    assert advice in told.value.fix
    with pytest.raises(InputError) as told:
        backquant.quantize(net, example, backend="tensorrt", calibration=data(batches()))
    assert told.value.what == f"batch 0 is on {given}, and the model on {own}"
    assert told.value.fix == f"batches on {own}: batch.to('{own}')"


def test_training_there_converts_to_the_cpu() -> None:
    from backquant import convert_fx, get_default_qat_qconfig_mapping, prepare_qat_fx

    data = there(batches())
    model = Net().there().train()
    prepared = prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (data[0],))
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    for batch in data:
        optimizer.zero_grad()
        prepared(batch).square().mean().backward()
        optimizer.step()
    prepared.eval()
    wanted = prepared(data[0]).detach().cpu()
    made = convert_fx(prepared)
    assert made(batches()[0]).sub(wanted).abs().max() < 0.2 * wanted.abs().max()


def test_compare_and_sensitivity_run_there() -> None:
    moved, data = Net().eval().there(), there(batches())
    made = backquant.quantize(moved, backend="tensorrt", calibration=data, slower="keep")
    here = backquant.quantize(
        Net().eval(), backend="tensorrt", calibration=batches(), slower="keep"
    )
    one = backquant.compare(moved, made, data)
    other = backquant.compare(Net().eval(), here, batches())
    assert [str(row) for row in one.rows] == [str(row) for row in other.rows]
    assert backquant.sensitivity(moved, data=data, backend="tensorrt").groups


def test_devices_that_a_graph_names_become_the_cpu() -> None:
    class Positions(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(3, device=ELSEWHERE)

    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), Positions()).to(ELSEWHERE))
    moved = on_cpu(traced)
    assert moved(torch.ones(1, 3)).device.type == "cpu"
    assert isinstance(traced(torch.ones(1, 3).to(ELSEWHERE)), Elsewhere)


def test_tied_parameters_stay_tied() -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(one, other).to(ELSEWHERE)
    other.weight = one.weight
    moved = on_cpu(model)
    assert moved[0].weight is moved[1].weight
    assert moved[0].weight.device.type == "cpu"


def test_tensors_that_are_plain_attributes_are_copied_too() -> None:
    net = Net().eval().there()
    moved = on_cpu(net)
    assert (moved.shift.device.type, net.shift.device) == ("cpu", ELSEWHERE)
    assert same(moved(batches()[0]), net(there(batches())[0]))
