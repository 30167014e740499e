"""State that a call leaves outside of the model: globals, closures, classes, iterators, generators."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import backquant
from backquant.errors import CaptureError
from backquant.qconfig import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(s)) + 1 for s in range(4)]

CALLS = 0
MEAN = torch.zeros(8)
SEEN: list[Tensor] = []
BY_NAME: dict[str, Tensor] = {}
SCALES = itertools.cycle([1.0, 2.0, 4.0])
HOLDER = SimpleNamespace(calls=0)
TRACKER = nn.BatchNorm1d(8)
LAST: Tensor | None = None
WINDOW: deque[Tensor] = deque(maxlen=3)
RNG = np.random.default_rng(0)
TORCH_RNG = torch.Generator().manual_seed(3)
LOCAL = threading.local()
LOGGED = 0
TABLES: dict[int, Tensor] = {}


def _ramp() -> Iterator[float]:
    value = 0.0
    while True:
        value += 0.25
        yield value


RAMP = _ramp()


def _global_counter(x: Tensor) -> Tensor:
    global CALLS  # noqa: PLW0603
    CALLS += 1
    return x * CALLS


def _global_mean(x: Tensor) -> Tensor:
    MEAN.mul_(0.9).add_(0.1 * x.mean(0))
    return x - MEAN


def _global_rebound(x: Tensor) -> Tensor:
    global LAST  # noqa: PLW0603
    LAST = x.mean(0) if LAST is None else 0.5 * (LAST + x.mean(0))
    return x - LAST


def _global_list(x: Tensor) -> Tensor:
    SEEN.append(x.mean(0))
    return x + torch.stack(SEEN).sum(0)


def _global_dict(x: Tensor) -> Tensor:
    BY_NAME["mean"] = 0.5 * BY_NAME.get("mean", torch.zeros(8)) + x.mean(0)
    return x + BY_NAME["mean"]


def _window(x: Tensor) -> Tensor:
    WINDOW.append(x.mean(0))
    return x + torch.stack(list(WINDOW)).sum(0)


def _cycle(x: Tensor) -> Tensor:
    return x * next(SCALES)


def _generator(x: Tensor) -> Tensor:
    return x * next(RAMP)


def _object(x: Tensor) -> Tensor:
    HOLDER.calls += 1
    return x / HOLDER.calls


def _hidden_module(x: Tensor) -> Tensor:
    return x - TRACKER.train()(x).detach() * 0 - TRACKER.running_mean


def _default(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return x * len(seen)


def _attribute_of_function(x: Tensor) -> Tensor:
    _attribute_of_function.calls = getattr(_attribute_of_function, "calls", 0) + 1  # type: ignore[attr-defined]
    return x * _attribute_of_function.calls  # type: ignore[attr-defined]


def _thread_local(x: Tensor) -> Tensor:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    return x * LOCAL.calls


def _random(x: Tensor) -> Tensor:
    return x * (1 + random.random() / 100)


def _branch(x: Tensor) -> Tensor:
    return x * 2 if random.random() < 0.5 else x


def _numpy_random(x: Tensor) -> Tensor:
    return x + float(np.random.rand()) / 100


def _own_numpy(x: Tensor) -> Tensor:
    return x + float(RNG.random())


def _own_torch(x: Tensor) -> Tensor:
    return x + torch.rand(8, generator=TORCH_RNG)


def _clock(x: Tensor) -> Tensor:
    return x * (1 + time.perf_counter() % 1)


def _closure() -> Callable[[Tensor], Tensor]:
    calls = 0

    def step(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return step


class _OfClass:
    calls = 0

    @classmethod
    def step(cls, x: Tensor) -> Tensor:
        cls.calls += 1
        return x * cls.calls


def _of_class(x: Tensor) -> Tensor:
    return _OfClass.step(x)


def _scaled(number: Iterator[int], x: Tensor) -> Tensor:
    return x * (1 + next(number))


MEMBERS = [_global_counter, _global_mean, _global_rebound, _global_list, _global_dict, _window]
MEMBERS += [_cycle, _generator, _object, _hidden_module, _default, _attribute_of_function]
MEMBERS += [_thread_local, _random, _branch, _numpy_random, _own_numpy, _own_torch, _clock]
MEMBERS += [_of_class]


class Between(nn.Module):
    """Linear layers before and after a function, which a module of its own calls."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.kind, self.last = nn.Linear(8, 8), Calling(function), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.kind(self.first(x))))


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class InAttribute(nn.Module):
    """An iterator, or a generator of random numbers, that the module holds."""

    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.held, random.Random):
            return x * self.held.random()
        if isinstance(self.held, np.random.Generator):
            return x * float(self.held.random())
        if isinstance(self.held, torch.Generator):
            return x * torch.rand(8, generator=self.held)
        return x * float(next(self.held))  # type: ignore[call-overload]


class _Step:
    """An object that is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.step(x)

    def step(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


STEP = _Step()


def _called_object(x: Tensor) -> Tensor:
    return STEP(x)


MADE = {
    "closure": _closure,
    "partial": lambda: functools.partial(_scaled, itertools.count()),
    "method": lambda: _Step().step,
}
MEMBERS += [_called_object]


@functools.cache
def _table(length: int) -> Tensor:
    return torch.linspace(0, 1, length)


def _kept_table(x: Tensor) -> Tensor:
    if x.shape[1] not in TABLES:
        TABLES[x.shape[1]] = torch.linspace(0, 1, x.shape[1])
    return x + TABLES[x.shape[1]] + _table(8)


def _logged(x: Tensor) -> Tensor:
    global LOGGED  # noqa: PLW0603
    LOGGED += 1
    return torch.relu(x)


def _drawn_for_nothing(x: Tensor) -> Tensor:
    """As layers that are dropped in training draw in evaluation."""
    drop = random.random() < 0.5
    return x * 2 if drop and x.requires_grad else x + 1


def _watched(x: Tensor) -> Tensor:
    SHAPES.append(tuple(x.shape))
    return torch.relu(x)


SHAPES: list[tuple[int, ...]] = []


@pytest.mark.parametrize("flow", ["quantize", "fx", "qat"])
@pytest.mark.parametrize("function", [*MEMBERS, *MADE], ids=lambda f: getattr(f, "__name__", f))
def test_state_outside_is_refused_by_name(
    function: Callable[[Tensor], Tensor] | str, flow: str, snapshot: Callable[..., None]
) -> None:
    model = Between(MADE[function]() if isinstance(function, str) else function).eval()
    drawn, mapping = random.getstate(), get_default_qconfig_mapping("x86")
    with pytest.raises(CaptureError) as refused:
        if flow == "quantize":
            backquant.quantize(model, calibration=BATCHES, backend="x86")
        elif flow == "fx":
            backquant.prepare_fx(model, mapping, (BATCHES[0],))
        else:
            trained = get_default_qat_qconfig_mapping("x86")
            backquant.prepare_qat_fx(model.train(), trained, (BATCHES[0],))
    assert refused.value.where == "kind: Calling.forward"
    assert random.getstate() == drawn
    if flow == "quantize":
        snapshot(getattr(function, "__name__", function), refused.value)


@pytest.mark.parametrize("function", [_kept_table, _logged, _drawn_for_nothing, _watched])
def test_what_no_later_call_reads_is_no_state(function: Callable[[Tensor], Tensor]) -> None:
    model = Between(function).eval()
    quantized = backquant.quantize(model, calibration=BATCHES, backend="x86", slower="keep")
    with torch.no_grad():
        noise = (quantized(BATCHES[0]) - model(BATCHES[0])).square().sum()
        assert noise < 1e-2 * model(BATCHES[0]).square().sum()


@pytest.mark.parametrize(
    "held",
    [
        lambda: itertools.cycle([1.0, 2.0, 4.0]),
        lambda: itertools.count(1),
        lambda: iter([1.0, 2.0] * 50),
        lambda: random.Random(0),
        lambda: np.random.default_rng(0),
        lambda: torch.Generator().manual_seed(0),
    ],
)
def test_what_moves_in_an_attribute_is_state_of_the_module(held: Callable[[], object]) -> None:
    model, alike = Between(torch.relu).eval(), Between(torch.relu).eval()
    model.kind, alike.kind = InAttribute(held()), InAttribute(held())
    quantized = backquant.quantize(model, calibration=BATCHES, backend="x86", slower="keep")
    assert "which the next call reads" in str(quantized.report)
    with torch.no_grad():
        for x in BATCHES:
            wanted = alike(x)
            noise = (quantized(x) - wanted).square().sum()
            assert noise < 2e-2 * wanted.square().sum()


@pytest.mark.parametrize("function", [_global_counter, _random, _clock])
def test_state_of_the_model_itself(
    function: Callable[[Tensor], Tensor], snapshot: Callable[..., None]
) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.layer(x))

    with pytest.raises(CaptureError) as refused:
        backquant.quantize(Whole().eval(), calibration=BATCHES, backend="onnxruntime")
    snapshot(f"whole{function.__name__}", refused.value)


def test_a_hook_with_state(snapshot: Callable[..., None]) -> None:
    model, step = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), _closure()
    model[0].register_forward_hook(lambda *call: step(call[2]))
    with pytest.raises(CaptureError) as refused:
        backquant.quantize(model, calibration=BATCHES, backend="x86")
    snapshot("hook", refused.value)


def test_a_module_that_is_left_whole_shares_the_state() -> None:
    model = Between(_global_counter).eval()
    custom = backquant.PrepareCustomConfig().set_non_traceable_module_names(["kind"])
    quantized = backquant.quantize(
        model, calibration=BATCHES, prepare_custom_config=custom, backend="x86", slower="keep"
    )
    before = CALLS
    quantized(BATCHES[0])
    assert before + 1 == CALLS


@pytest.mark.parametrize("suffix", ["onnx", "pte"])
def test_no_file_holds_it(suffix: str, tmp_path: Path) -> None:
    backend = {"onnx": "onnxruntime", "pte": "xnnpack"}[suffix]
    custom = backquant.PrepareCustomConfig().set_non_traceable_module_names(["kind"])
    quantized = backquant.quantize(
        Between(_cycle).eval(),
        calibration=BATCHES,
        prepare_custom_config=custom,
        backend=backend,
        slower="keep",
    )
    with pytest.raises(backquant.BackquantError, match="SCALES"):
        backquant.export(quantized, tmp_path / f"model.{suffix}")


def _moved_into_a_submodule(*_: object) -> None:
    from tests.reports.test_state import Averaged
    from tests.reports.test_state import Between as Stateful

    backquant.quantize(Stateful(Averaged).eval(), calibration=BATCHES, backend="x86")


def _drawn_with_torch(*_: object) -> None:
    backquant.quantize(Between(lambda x: x * torch.rand(())).eval(), calibration=BATCHES)


BY_HAND = {"move these lines": _moved_into_a_submodule, "draw with torch": _drawn_with_torch}
