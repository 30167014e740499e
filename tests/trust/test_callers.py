"""Who calls a lowered model, and how: the result is that of the plain call, or an error of ours says why not.
A model that was called so answers plain calls as before."""

from __future__ import annotations

import copy
import io
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from os import _exit, fork, waitpid
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import backquant
from backquant import QConfigMapping, default_dynamic_qconfig, default_mapping
from backquant.errors import BackquantError
from backquant.graph import own_thread
from backquant.lower.kernels import engine_setting

Model = Callable[..., torch.Tensor]
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Kernels around layers that stay float; a tensor that is made in the call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(self.first(x).relu())
        x = self.last(self.norm(x.permute(0, 2, 3, 1)) * 2.0).mean((1, 2))
        return x @ torch.ones(5, 3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x.flatten(1, 2))[0])


def quantized(backend: str) -> Any:
    torch.manual_seed(0)
    if backend.startswith("dynamic "):
        mapping = QConfigMapping().set_global(default_dynamic_qconfig)
        engine = backend.removeprefix("dynamic ")
        return backquant.quantize(Recurrent().eval(), X, backend=engine, qconfig_mapping=mapping)
    mapping = default_mapping(backend).set_module_name("between", None)
    return backquant.quantize(
        Net().eval(), backend=backend, calibration=[X], qconfig_mapping=mapping, slower="keep"
    )


@pytest.fixture(scope="module", params=["x86, loaded", "qnnpack", "dynamic qnnpack"])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not request.param.endswith(", loaded"):
        return quantized(request.param)
    path = tmp_path_factory.mktemp("callers") / "model.bq"
    backquant.save(quantized(request.param.removesuffix(", loaded")), path)
    return backquant.load(path)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def within(context: Callable[[], Any]) -> Callable[[Model, torch.Tensor], torch.Tensor]:
    def call(model: Model, x: torch.Tensor) -> torch.Tensor:
        with context():
            return model(x)

    return call


def inference_tensor(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def hooked(model: Any, x: torch.Tensor) -> torch.Tensor:
    hook = model.graph_module.register_forward_hook(lambda *_: None)
    try:
        return model(x)
    finally:
        hook.remove()


def stored(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


SAME: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "autocast to bfloat16": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast to float16": within(lambda: torch.autocast("cpu", torch.float16)),
    "inference_mode": within(torch.inference_mode),
    "no_grad": within(torch.no_grad),
    "a tensor of inference_mode": lambda model, x: model(inference_tensor(x)),
    "inputs that require grad": lambda model, x: model(x.clone().requires_grad_()),
    "functional_call": lambda model, x: torch.func.functional_call(model, model.state_dict(), (x,)),
    "a default dtype of float64": within(lambda: default_dtype(torch.float64)),
    "a default device": within(lambda: torch.device("meta")),
    "a dispatch mode": within(lambda: FlopCounterMode(display=False)),
    "a hook": hooked,
    "deepcopy": lambda model, x: copy.deepcopy(model)(x),
    "pickle": lambda model, x: pickle.loads(pickle.dumps(model))(x),
    "torch.save": lambda model, x: stored(model)(x),
    "a negative view": lambda model, x: model(torch._neg_view(-x)),
    "train": lambda model, x: model.train()(x),
}


@pytest.mark.parametrize("kind", SAME)
def test_the_result_is_that_of_the_plain_call(kind: str, model: Any) -> None:
    """… in the first call of a copy, in later ones, and in a plain call after them."""
    expected, fresh = model(X), copy.deepcopy(model)
    for _ in range(3):
        found = SAME[kind](fresh, X)
        assert torch.equal(found, expected) and not found.requires_grad
        assert type(found) is torch.Tensor
    for _ in range(3):
        assert torch.equal(fresh(X.clone().requires_grad_()), expected)


def fake(model: Model, x: torch.Tensor) -> Any:
    with FakeTensorMode() as mode:
        return model(mode.from_tensor(x))


def fake_cuda(model: Model, x: torch.Tensor) -> Any:
    with FakeTensorMode():
        x = torch.empty(x.shape, device="cuda")
    return model(x)


REFUSED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda model, x: torch.func.vmap(model)(x[None]),
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "a meta tensor": lambda model, x: model(x.to("meta")),
    "a fake tensor": fake,
    "a fake tensor on cuda": fake_cuda,
    "FakeTensorMode around": within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "make_fx": lambda model, x: make_fx(model)(x),
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
    "symbolic_trace": lambda model, x: torch.fx.symbolic_trace(model),
    "sparse": lambda model, x: model(x.to_sparse()),
    "nested": lambda model, x: model(torch.nested.as_nested_tensor([*x])),
    "an array": lambda model, x: model(x.numpy()),
    "nothing": lambda model, x: model(None),
    "no argument": lambda model, x: model(),
    "two arguments": lambda model, x: model(x, x),
    "a name": lambda model, x: model(y=x),
    "one feature less": lambda model, x: model(x[:, :2, :, :7]),
    "no dimension": lambda model, x: model(x.sum()),
}


@pytest.mark.filterwarnings("ignore:.*(deprecated|nested tensors|performance drop)")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_kernels_cannot_serve_is_refused(kind: str, model: Any) -> None:
    """… in the first call, where weights would be packed, and in a recorded one, with no trace left."""
    expected = model(X)
    for calls in (0, 3):
        fresh = copy.deepcopy(model)
        for _ in range(calls):
            fresh(X)
        with pytest.raises(BackquantError) as caught:
            REFUSED[kind](fresh, X)
        assert caught.value.what and caught.value.where
        for _ in range(3):
            assert torch.equal(fresh(X), expected)


class Answers(torch.utils.data.Dataset[torch.Tensor]):
    """The same call of a model, four times, in a worker."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, _: int) -> torch.Tensor:
        return self.model(X)[0].clone()


def test_workers_answer_the_same() -> None:
    """Forked ones; a spawned one gets what ``pickle`` gives."""
    made = quantized("qnnpack")
    expected = made(X)[0]
    loader = DataLoader(Answers(made), num_workers=2, multiprocessing_context="fork")
    assert all(torch.equal(found[0], expected) for found in loader)
    with get_context("fork").Pool(2) as pool:
        assert all(
            torch.equal(found, expected) for found in pool.map(Answers(made).__getitem__, range(4))
        )


def test_a_fork_amid_running_packing_recording_and_capturing_goes_on() -> None:
    """Locks that other threads held are open in the child, and the engine is the one that was set."""
    made, held, done = quantized("qnnpack"), threading.Event(), threading.Event()
    fresh, expected = copy.deepcopy(made), made(X)

    def others() -> None:
        with (
            own_thread.capture_in_own_thread(),
            fresh.replays._lock,
            engine_setting.packing_for("qnnpack"),
            engine_setting.running(),
        ):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=others)
    thread.start()
    assert held.wait(60)
    before = torch.backends.quantized.engine
    child = fork()
    if child == 0:
        signal.alarm(60)
        try:
            assert torch.backends.quantized.engine != before
            assert all(torch.equal(fresh(X), expected) for _ in range(4))
            assert torch.equal(quantized("qnnpack")(X), expected)
            _exit(0)
        except AssertionError:
            traceback.print_exc()
        finally:
            _exit(2)
    _, status = waitpid(child, 0)
    done.set()
    thread.join(60)
    assert before == "qnnpack" and status == 0
