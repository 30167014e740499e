"""Models whose own ``forward`` no capture takes, quantized part by part."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.snapshots import compare as snapshot
from torch import nn

import backquant
from backquant.api.parts import CallsOf, calls_of, survey
from backquant.errors import BackquantError, CoverageError, UsageError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.inner = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.inner(x)


class Chosen(nn.Module):
    """Rows are chosen by their values; what is between them is called in four ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(16)
        self.shared = Block(16)
        self.again = self.shared
        self.many = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, 4)
        self.never = nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.calls += 1
        x = self.again(self.shared(self.first(x, scale=0.5)))
        for block in self.many:
            x = block(x[: block.width])
        chosen = x[x.sum(1) > 0]
        return [self.head(row[None]) for row in chosen]


def data(count: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(16, 16) for _ in range(count)]


def made(model: nn.Module, **more: Any) -> backquant.api.PartlyQuantized:
    return backquant.quantize_parts(model.eval(), calibration=data(), slower="keep", **more)


def test_each_part_is_what_quantize_makes_of_it_with_the_same_calls() -> None:
    torch.manual_seed(1)
    model = Chosen()
    found = made(model, recipe="none")
    assert list(found.parts) == ["first", "shared", "many.0", "many.1", "head"]
    assert found.coverage == 1.0 and list(found.in_float) == ["never"]
    batch = data(1)[0]
    block = model.get_submodule("many.1")
    calls = list(CallsOf(model, block, 1, data()))
    alone = backquant.quantize(block, calibration=calls, slower="keep", recipe="none")
    x = torch.randn(16, 16)
    assert torch.equal(found.parts["many.1"](x), alone(x))
    with torch.no_grad():
        wanted, got = torch.stack(model(batch)), torch.stack(found(batch))
    assert float((wanted - got).norm() / wanted.norm()) < 0.05


def test_the_model_stays_as_it_is_and_shares_nothing() -> None:
    model = Chosen()
    before = copy.deepcopy(model.state_dict())
    found = made(model)
    assert type(found.model) is Chosen and type(model.first) is Block
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert own.isdisjoint(tensor.data_ptr() for tensor in found.model.state_dict().values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert float(found.model.get_buffer("calls")) == 0.0


def test_a_module_at_two_places_is_one_part() -> None:
    found = made(Chosen())
    assert found.model.again is found.model.shared is found.parts["shared"]  # type: ignore[comparison-overlap]
    assert found.multiply_adds["shared"] == 2 * found.multiply_adds["first"]
    assert found.total == sum(found.multiply_adds.values())


class ByOtherWays(nn.Module):
    """Parts of which the model calls more than ``forward``, or which it does not call by name."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8)
        self.encoder = Block(8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.plain = [self.layers[0]]
        self.decides = Decides()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x) + self.block.inner[0].weight.sum()
        x = self.encoder.forward(x)
        for layer in self.plain:
            x = layer(x)
        return self.decides(x)


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.low(x) if x.sum().item() < -1e9 else self.high(x)


def test_what_is_called_by_other_ways_is_divided() -> None:
    model = ByOtherWays().eval()
    batches = [torch.randn(4, 8) for _ in range(4)]
    found = backquant.quantize_parts(model, calibration=batches, slower="keep")
    assert list(found.parts) == ["block.inner.2", "encoder.inner", "decides.high"]
    assert found.in_float["layers.0"] == "the model calls it by another way than its path"
    assert "the model fails with it: " in found.in_float["block"]
    assert "depends on the values" in found.in_float["decides"]
    assert found.in_float["decides.low"] == "the model does not call it for the first batch"
    assert 0.5 < found.coverage < 1
    text = str(found)
    assert text.startswith("ByOtherWays: ") and "outside of these parts: " in text
    assert torch.allclose(found(batches[0]), model(batches[0]), atol=0.3)


class PreActivated(nn.Module):
    """What is added is what the first part left of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        return self.part(x) + x if x.sum().item() > -1e9 else x


def test_a_part_that_changes_its_input_is_divided() -> None:
    model = PreActivated().eval()
    batches = [torch.randn(4, 8) for _ in range(4)]
    found = backquant.quantize_parts(model, calibration=batches, slower="keep")
    assert list(found.parts) == ["part.1"] and "in place" in found.in_float["part"]
    with torch.no_grad():
        assert torch.allclose(found(batches[0]), model(batches[0]), atol=0.1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_torchscript_stays_as_it_is() -> None:
    model = Decides().eval()
    model.high = torch.jit.script(nn.Sequential(nn.Linear(8, 8)))  # type: ignore[assignment]
    net = nn.Sequential(nn.Linear(8, 8), model)
    x = torch.randn(4, 8)
    found = backquant.quantize_parts(net, calibration=[x] * 3, slower="keep")
    assert list(found.parts) == ["0"]
    assert found.in_float["1.high"] == "it is TorchScript, whose operators cannot be seen"
    assert torch.allclose(found(x), net(x), atol=0.1)


class Solves(Decides):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ torch.linalg.inv(torch.eye(8) * 2)


def test_what_cannot_be_counted_is_named() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Solves()).eval()
    found = backquant.quantize_parts(net, calibration=[torch.randn(4, 8)] * 3, slower="keep")
    assert found.uncounted and "not counted: aten.linalg_inv" in str(found)


def test_parts_that_are_named() -> None:
    found = made(Chosen(), parts=["many.1", "head"])
    assert list(found.parts) == ["many.1", "head"] and found.coverage < 0.5
    with pytest.raises(CoverageError, match="required"):
        made(Chosen(), parts=["head"], require=0.5)


def test_weights_alone_and_compiled() -> None:
    model, x = Chosen().eval(), data(1)[0]
    found = backquant.quantize_parts(model, x, weights="int8")
    assert found.coverage == 1.0 and len(found(x)) == len(model(x))
    static = made(model)
    compiled = static.compile()
    assert list(compiled.parts) == list(static.parts) and type(compiled.model) is Chosen
    for one, two in zip(static(x), compiled(x), strict=True):
        assert torch.allclose(one, two, atol=0.1)


def test_calls_are_kept_and_copied() -> None:
    runs: list[int] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            first = self.part(x)
            x.add_(1)
            return self.part(x) + first

    model = Model().eval()
    batches = [torch.zeros(1, 2), torch.zeros(1, 2)]
    assert {type(part): seen.calls for part, seen in survey(model, torch.zeros(1, 2)).items()} == {
        Model: 1,
        nn.Linear: 2,
    }
    runs.clear()
    calls = calls_of(model, model.part, 2, batches)
    assert [float(x[0, 0]) for (x,) in calls] == [0.0, 1.0, 0.0, 1.0]
    assert [float(x[0, 0]) for (x,) in calls] == [0.0, 1.0, 0.0, 1.0] and len(runs) == 2
    assert not hasattr(calls, "__len__") and len(calls_of(model, model.part, 1, batches)) == 2


def test_messages() -> None:
    refused: dict[str, Any] = {
        "nothing-to-quantize": lambda: made(nn.Sequential(nn.ReLU(), nn.ReLU())),
        "a-path-that-is-none": lambda: made(Chosen(), parts=["nowhere"]),
        "a-part-that-is-not-called": lambda: made(Chosen(), parts=["never"]),
        "a-part-that-no-capture-takes": lambda: backquant.quantize_parts(
            ByOtherWays().eval(), calibration=[torch.randn(4, 8)], parts=["decides"]
        ),
        "parts-required-by-name": lambda: made(Chosen(), require="head"),
        "a-share-that-is-not-reached": lambda: made(Chosen(), parts=["head"], require=0.9),
        "no-data": lambda: backquant.quantize_parts(Chosen().eval()),
    }
    for name, call in refused.items():
        with pytest.raises(BackquantError) as raised:
            call()
        snapshot(Path(__file__), name, str(raised.value))
    with pytest.raises(UsageError):
        backquant.quantize_parts("model.pt2", calibration=data())  # type: ignore[arg-type]


class Pooled(nn.Module):
    """As in sentence-transformers: modules that hand a dict on, which each adds its results to."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Block(16)

        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            features["hidden"] = self.net(features["x"])
            return features

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.Encoder()

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        self.encoder(features)
        hidden = features["hidden"]
        return hidden[hidden.sum(1) > 0]


def test_dicts_that_parts_add_to_stay_as_they_were() -> None:
    batches = [({"x": x},) for x in data()]
    found = backquant.quantize_parts(Pooled().eval(), calibration=batches, slower="keep")
    assert list(found.parts) == ["encoder.net"] and found.coverage == 1
    assert [list(features) for (features,) in batches] == [["x"]] * 4
    assert "changes its inputs" in found.in_float["encoder"]
    assert found({"x": data()[0]}).shape[1] == 16
