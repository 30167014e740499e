"""Models that draw random numbers: what is quantized draws as they do, or the capture is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import backquant
from backquant.errors import CaptureError
from backquant.graph import capture
from backquant.graph.example_call import ExampleCall
from backquant.pipeline.faithful import agrees

Between = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


def selected(x: torch.Tensor) -> torch.Tensor:
    """As masked autoencoders: a part of the rows, at random."""
    order = torch.argsort(torch.rand(x.shape[0], 8), dim=1)
    return torch.gather(x, 1, order)


DRAWS: dict[str, Between] = {
    "like": lambda x: x + torch.randn_like(x),
    "sized": lambda x: x + torch.randn(x.shape[0], 8),
    "constant": lambda x: x + torch.randn(4, 8),
    "quiet": lambda x: x + 3e-2 * torch.randn(4, 8),
    "in place": lambda x: x + torch.empty(4, 8).normal_(),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "alone": lambda x: torch.randn(x.size(0), 8),
    "selected": selected,
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_quantized_draws_as_the_model(name: str) -> None:
    torch.manual_seed(0)
    model, x = Net(DRAWS[name]).eval(), torch.randn(4, 8)
    batches = [torch.randn(4, 8) for _ in range(8)]
    quantized = backquant.quantize(model, x, backend="x86", calibration=batches, slower="keep")
    assert quantized.report.coverage == 1.0
    assert "draws random numbers at each call: aten." in str(quantized.report)
    with torch.no_grad():
        torch.manual_seed(1)
        wanted = model(x)
        torch.manual_seed(1)
        found, *others = (quantized(x) for _ in range(4))
    noise = (found - wanted).square().sum()
    assert 10 * torch.log10(wanted.square().sum() / noise) > 20
    assert not any(torch.equal(found, other) for other in others)


@pytest.mark.parametrize("name", ["constant", "quiet", "in place"])
def test_a_trace_would_keep_one_draw_and_is_refused(
    name: str, snapshot: Callable[..., None]
) -> None:
    model, x = Net(DRAWS[name]).eval(), torch.randn(4, 8)
    with pytest.raises(CaptureError, match=r"draws random numbers.*drawn once") as caught:
        backquant.quantize(model, x, backend="x86", calibration=[x], capture="trace")
    assert __file__ in caught.value.where
    snapshot(name.replace(" ", "_"), re.sub(r"/\S*/(\w+\.py:)\d+", r"\1N", str(caught.value)))


def test_draws_without_effect_are_nobodys_business() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        torch.rand([])  # as a layer that decides about its own dropout, in evaluation mode too
        return torch.relu(x)

    model, x = Net(between).eval(), torch.randn(4, 8)
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x], capture="trace")
    assert "draws" not in str(quantized.report)


def test_numbers_of_other_generators_are_refused_by_name(snapshot: Callable[..., None]) -> None:
    numbers = cycle(10.0**k for k in range(30))  # as a generator that torch does not know
    model, x = Net(lambda x: x * next(numbers)).eval(), torch.randn(4, 8)
    with pytest.raises(CaptureError, match="variable 'numbers', outside of the model") as caught:
        backquant.quantize(model, x, backend="x86", calibration=[x])
    snapshot("other_generators", str(caught.value))


def test_a_model_that_changes_its_input_is_refused_by_name(snapshot: Callable[..., None]) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            state.mul_(2)
            return self.layer(x + state)

    data = [(torch.randn(2, 8), torch.randn(2, 8)) for _ in range(2)]
    with pytest.raises(CaptureError) as caught:
        backquant.quantize(Doubles().eval(), calibration=data)
    snapshot("changed_input", str(caught.value))


def test_the_generator_is_left_as_it_was_by_a_look() -> None:
    model, x = Net(DRAWS["like"]).eval(), torch.randn(4, 8)
    before = torch.get_rng_state()
    backquant.explain(model, x)
    assert torch.equal(before, torch.get_rng_state())


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.ones(2, 4)], 1)


@pytest.mark.parametrize(("rows", "runs"), [(2, True), (3, False)])
def test_a_graph_that_fails_on_its_inputs_is_tried_in_silence(
    rows: int, runs: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Doubled()
    assert agrees(capture(model).module, model, torch.ones(rows, 4)) is runs
    assert capsys.readouterr().err == ""


def test_what_the_model_gave_before_is_not_asked_again() -> None:
    """... where it is the graph's; else the model is called, which decides."""
    calls: list[int] = []

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x * 1.0

    x = torch.ones(2)
    called = ExampleCall(x, torch.ones(2), {}, 0)
    assert agrees(fx.symbolic_trace(nn.Identity()), Counted(), x, called) is True
    assert not calls
    assert agrees(fx.symbolic_trace(lambda x: x * 3.0), Counted(), x, called) is False
    assert calls


def _quantized(between: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    backquant.quantize(Net(between).eval(), x, backend="x86", calibration=[x])


class DrawnBefore(nn.Module):
    """Noise comes as an input, and is changed in a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        noise = noise.clone()
        noise.mul_(2)
        return self.layer(x + noise)


def _drawn_before() -> None:
    data = [(torch.randn(2, 8), torch.randn(2, 8)) for _ in range(2)]
    for how in ("trace", "export"):
        backquant.quantize(DrawnBefore().eval(), calibration=data, capture=how)


BY_HAND = {
    "draw them before the call": lambda *_: _drawn_before(),
    "move these lines": lambda _, n: _quantized(lambda x: x * 2, n["x"]),
    "change a copy": lambda *_: _drawn_before(),
}
