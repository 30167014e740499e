"""State that a call leaves in the model for the next: running means, caches, rings, counters, lists."""

from __future__ import annotations

import copy
from collections import Counter as Counter_
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import backquant
from backquant.errors import ArtifactError, BackquantError, CaptureError, UsageError
from backquant.qconfig import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

BATCHES = [
    torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) + 1 for seed in range(4)
]


class Averaged(nn.Module):
    """A running mean that is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


class InPlace(Averaged):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.mean


class Copied(Averaged):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(0.9 * self.mean + 0.1 * x.mean(0))
        return x - self.mean


class Ring(nn.Module):
    """The last four means, and where the next is to go."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(4, 8))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.ring[self.place % 4] = x.mean(0)
        self.place += 1
        return x + self.ring.mean(0)


class Cache(nn.Module):
    """Keys of which a call writes some, and reads all."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.keys[:2] = x[:2] + self.keys[2:4]
        return x + self.keys.mean(0)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.mean(0))
        return x + torch.stack(self.seen).mean(0)


class Window(nn.Module):
    """The last three, in a plain attribute that PyTorch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[Tensor] = deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.last.append(x.mean(0))
        return x + torch.stack(list(self.last)).sum(0)


class Previous(nn.Module):
    """The last hidden state, none before the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.mean(0) if self.hidden is None else torch.tanh(self.hidden + x.mean(0))
        self.hidden = hidden
        return x + hidden


class Keys:
    """A cache of keys, as a class of the user's own."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def update(self, x: Tensor) -> Tensor:
        self.keys = x if self.keys is None else torch.cat([self.keys, x])
        return self.keys


class InAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Keys()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cache.update(x.mean(0, keepdim=True)).sum(0)


class InANamespace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.held.calls += 1
        return x / self.held.calls


class InAnArray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset = np.zeros(8, np.float32)

    def forward(self, x: Tensor) -> Tensor:
        self.offset += 1
        return x + torch.from_numpy(self.offset.copy())


class InAHiddenModule(nn.Module):
    """In a list, so that the other module's buffers are no part of the ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Averaged()]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](x)


class Countdown(nn.Module):
    """Other values for the first three calls: the number is compared, not computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 3

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        return x * (2.0 if self.left >= 0 else 1.0)


class FirstCall(nn.Module):
    """The first call is another than all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "first"

    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if self.phase == "first" else 1.0
        self.phase = "later"
        return x * scale


class FirstSeen(nn.Module):
    """Keeps the first inputs for good."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.mean(0)
        return x - self.first


class OtherMemory(Averaged):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


class Adapting(nn.Module):
    """Brings its batch norm to training, whatever the mode of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train()
        return self.norm(x)


class PastVersions(Averaged):
    """Writes that PyTorch counts no version of."""

    def forward(self, x: Tensor) -> Tensor:
        found = x - self.mean
        self.mean.data.mul_(0.9).add_(0.1 * x.mean(0))
        return found


class InAKernel(Averaged):
    """Averages that a kernel keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        found = x - self.mean
        nn.functional.batch_norm(x, self.mean, self.spread, training=True)
        return found


class OfSeveral(Averaged):
    def forward(self, x: Tensor) -> Tensor:
        found = x - self.mean
        torch._foreach_add_([self.mean], [0.1 * x.mean(0)])
        return found


class InComplexNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        found = x - self.mean.real
        self.mean.data.add_(0.1 * x.mean(0))
        return found


class InABareModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Module()
        self.held.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.held.mean = 0.9 * self.held.mean + 0.1 * x.mean(0)
        return x - self.held.mean


class RowOfABuffer(nn.Module):
    """An attribute that is a view of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(4, 8))
        self.row = self.means[1]

    def forward(self, x: Tensor) -> Tensor:
        self.row.mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.means[1]


class CountedWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter_()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.update(["call"])
        return x / self.calls["call"]


class HookOfALayer(nn.Module):
    """A hook writes into the layer that it is of, an attribute that only a call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.fc.register_forward_hook(self.scaled)

    @staticmethod
    def scaled(layer: nn.Module, _: object, output: Tensor) -> Tensor:
        layer.calls = getattr(layer, "calls", 0) + 1
        return output / layer.calls

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class DropsAnyway(nn.Module):
    """Monte Carlo dropout: drops in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.drop.train()
        return self.drop(x)


UNCOUNTED = [PastVersions, InAKernel, OfSeveral, InComplexNumbers, InABareModule]
UNCOUNTED += [RowOfABuffer, CountedWords, HookOfALayer, DropsAnyway]
STATEFUL = [Averaged, InPlace, Copied, Ring, Cache, Counter, Growing, Window, Previous]
STATEFUL += [InAnObject, InANamespace, InAnArray, InAHiddenModule, Countdown, FirstCall]
STATEFUL += [FirstSeen, OtherMemory, Adapting]


class KeptMaps(nn.Module):
    """Keeps what it computes to be looked at: never read."""

    def forward(self, x: Tensor) -> Tensor:
        self.maps = torch.softmax(x, -1)
        return x * self.maps


class Table(nn.Module):
    """Makes a table at the first call, and reads it at all."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 8)
        return x + self.table


class Settings:
    """Looked at by every call, changed by none."""

    def __init__(self) -> None:
        self.scale, self.names = 2.0, {"x": [1, 2]}


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.settings.scale


class Profiled(nn.Module):
    """A counter that no result depends on, in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.profile = SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.profile.calls += 1
        return torch.relu(x)


class Between(nn.Module):
    """Linear layers before and after a module."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.kind, self.last = nn.Linear(8, 8), kind(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.kind(self.first(x))))


@pytest.mark.parametrize("kind", UNCOUNTED)
def test_state_that_no_version_or_class_shows(kind: type) -> None:
    model = Between(kind).eval()
    before = copy.deepcopy(model)
    quantized = backquant.quantize(model, calibration=BATCHES, backend="x86", slower="keep")
    with torch.no_grad():
        torch.manual_seed(1)
        wanted = [before(x).clone() for x in BATCHES]
        torch.manual_seed(1)
        found = [quantized(x).clone() for x in BATCHES]
    assert all(_decibels(*pair) > 18 for pair in zip(wanted, found, strict=True))


@pytest.mark.parametrize("flow", ["fx", "qat"])
@pytest.mark.parametrize("kind", [*STATEFUL, *UNCOUNTED])
def test_a_prepared_model_keeps_state_as_the_model_does(kind: type, flow: str) -> None:
    """Call by call, beyond the rounding: observers see what the model computes."""
    model = Between(kind).train(flow == "qat")
    before, config = copy.deepcopy(model), backquant.get_backend_config("x86")
    if flow == "fx":
        mapping = backquant.default_mapping("x86")
        prepared = backquant.prepare_fx(model, mapping, (BATCHES[0],), backend_config=config)
    else:
        mapping = backquant.get_default_qat_qconfig_mapping("x86")
        prepared = backquant.prepare_qat_fx(model, mapping, (BATCHES[0],), backend_config=config)
        prepared.apply(backquant.disable_fake_quant)
    with torch.no_grad():
        torch.manual_seed(1)
        wanted = [before(x).clone() for x in BATCHES]
        torch.manual_seed(1)
        for x, each in zip(BATCHES, wanted, strict=True):
            torch.testing.assert_close(prepared(x), each)


def _decibels(wanted: Tensor, found: Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (wanted - found).square().sum()))


def _tensors(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("capture", ["auto", "export"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_a_submodule_with_state_stays_float_and_keeps_it(kind: type, capture: str) -> None:
    model = Between(kind).eval()
    before, untouched = copy.deepcopy(model), _tensors(model)
    quantized = backquant.quantize(
        model, calibration=BATCHES, backend="x86", slower="keep", capture=capture
    )
    assert all(map(torch.equal, untouched, _tensors(model)))
    assert model.kind.__dict__.get("calls", 0) == 0
    with torch.no_grad():
        assert all(_decibels(before(x), quantized(x)) > 18 for x in BATCHES)
    rows = {row.node: row for row in quantized.report.rows}
    assert [rows[name].outcome for name in ("first", "last")] == ["quantized", "quantized"]
    assert "which the next call reads" in str(quantized.report)


@pytest.mark.parametrize("backend", ["x86", "onnxruntime"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_state_of_the_model_itself_is_refused_by_name(
    kind: type, backend: str, snapshot: Callable[..., None]
) -> None:
    class Whole(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.layer(x))

    names = {*vars(kind()), *dict(kind().named_buffers())} - set(vars(nn.Module()))
    with pytest.raises(CaptureError, match="which the next call reads") as caught:
        backquant.quantize(Whole().eval(), calibration=BATCHES, backend=backend)
    assert any(repr(name) in caught.value.what for name in names)
    snapshot(kind.__name__, caught.value)


@pytest.mark.parametrize("kind", [KeptMaps, Table, Configured, Profiled])
def test_what_no_later_call_reads_is_no_state(kind: type) -> None:
    model = Between(kind).eval()
    quantized = backquant.quantize(model, calibration=BATCHES, backend="x86", slower="keep")
    assert "next call" not in str(quantized.report)
    with torch.no_grad():
        assert all(_decibels(model(x), quantized(x)) > 25 for x in BATCHES)


@pytest.mark.parametrize("kind", STATEFUL)
def test_the_names_of_fx_keep_state_too(kind: type) -> None:
    model = Between(kind).eval()
    before = copy.deepcopy(model)
    mapping = get_default_qconfig_mapping("x86")
    prepared = backquant.prepare_fx(model, mapping, (BATCHES[0],))
    with torch.no_grad():
        for x in BATCHES:
            assert torch.allclose(prepared(x), before(x), atol=1e-5)
    quantized = backquant.convert_fx(prepared)
    with torch.no_grad():
        assert _decibels(before(BATCHES[2]), quantized(BATCHES[2])) > 10


@pytest.mark.parametrize("kind", [Averaged, InPlace, Counter])
def test_training_keeps_state(kind: type) -> None:
    model = Between(kind).train()
    mapping = get_default_qat_qconfig_mapping("x86")
    prepared = backquant.prepare_qat_fx(model, mapping, (BATCHES[0],))
    before = copy.deepcopy(model)
    for x in BATCHES[:2]:
        with torch.no_grad():
            assert _decibels(before(x), prepared(x)) > 10


@pytest.mark.parametrize("suffix", ["onnx", "pte"])
def test_an_export_of_state_is_refused_and_nothing_written(
    suffix: str, tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    backend = {"onnx": "onnxruntime", "pte": "xnnpack"}[suffix]
    model = Between(InPlace).eval()
    quantized = backquant.quantize(model, calibration=BATCHES, backend=backend, slower="keep")
    with pytest.raises(BackquantError) as refused:
        backquant.export(quantized, tmp_path / f"model.{suffix}")
    snapshot("export", refused.value)
    assert not list(tmp_path.iterdir())


def test_a_file_needs_leave_to_hold_such_a_module(tmp_path: Path) -> None:
    model = Between(InPlace).eval()
    quantized = backquant.quantize(model, calibration=BATCHES, backend="x86", slower="keep")
    with pytest.raises(ArtifactError, match="InPlace"):
        backquant.save(quantized, tmp_path / "model.bq")
    assert not list(tmp_path.iterdir())


def test_recipes_compare_call_by_call(snapshot: Callable[..., None]) -> None:
    with pytest.raises(UsageError) as refused:
        backquant.quantize(Between(InPlace), calibration=BATCHES, backend="x86", recipe="better")
    snapshot("recipe", refused.value)


def test_a_global_that_an_export_spoils_is_named(snapshot: Callable[..., None]) -> None:
    held: dict[str, Tensor] = {}

    class Global(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            held["mean"] = 0.5 * held.get("mean", 0.0) + x.mean(0)
            return x + held["mean"]

    with pytest.raises(CaptureError) as refused:
        backquant.quantize(Global().eval(), calibration=BATCHES, capture="export")
    snapshot("global", refused.value)


def _follows(model: nn.Module) -> None:
    """What holds the state is a submodule."""
    backquant.quantize(model.eval(), calibration=BATCHES, backend="x86", slower="keep")


class Passed(nn.Module):
    """The state comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer(x)
        mean = 0.9 * mean + 0.1 * x.mean(0)
        return x - mean, mean


def _exported(folder: Path) -> None:
    data = [(x, torch.zeros(8)) for x in BATCHES]
    made = backquant.quantize(Passed().eval(), calibration=data, backend="onnxruntime")
    path = folder / "passed.onnx"
    backquant.export(made, path)
    path.unlink()


BY_HAND = {
    "move these lines": lambda _, n: _follows(Between(n.get("kind", Averaged))),
    "pass the state as an input": lambda _, n: _exported(n["tmp_path"]),
}
