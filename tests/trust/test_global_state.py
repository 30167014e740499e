"""What a process has for all of its threads is after each public call and error as it was before."""

from __future__ import annotations

import copy
import decimal
import gc
import importlib
import locale
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import backquant
from backquant.cli.app import app
from backquant.runtime import QuantizedModel

pytestmark = pytest.mark.xdist_group("global_state")  # one worker pays for what they share
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Fails(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 3:
            raise RuntimeError("not three rows")
        return super().forward(x)


MODEL, FAILS = Model().eval(), Fails().eval()


def state() -> dict[str, Any]:
    """All that a call could change for others."""
    return {
        "engine": torch.backends.quantized.engine,
        "mkldnn": (torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "flush": torch.tensor([1e-39]).mul(1).item() != 0,
        "random": (hash(bytes(torch.get_rng_state())), hash(np.random.get_state()[1].tobytes())),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "filters": list(warnings.filters),
        "shown": warnings.showwarning,
        "signals": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)],
        "hooks": (sys.excepthook, threading.excepthook, sys.stdout, sys.stderr),
        "limits": (sys.getrecursionlimit(), decimal.getcontext().prec, np.geterr()),
        "locale": locale.getlocale(),
        "folder": Path.cwd(),
        "environment": frozenset(os.environ.items()),
        "path": list(sys.path),
        "log": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "calls": (nn.Module.__call__, nn.Module.__getattr__, torch.Tensor.__add__),
    }


def quantized(**options: Any) -> QuantizedModel:
    return backquant.quantize(
        copy.deepcopy(MODEL), X, **{"calibration": [X], "slower": "keep", **options}
    )


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """What libraries do to a process when they are imported: SymPy and SciPy add filters of warnings, and
    Inductor's configuration names its folder in the environment."""
    importlib.import_module("scipy.optimize")
    quantized()


def flow(model: nn.Module, qat: bool = False) -> Any:
    mapping = backquant.get_default_qconfig_mapping("x86")
    if qat:
        mapping = backquant.get_default_qat_qconfig_mapping("x86")
        prepared = backquant.prepare_qat_fx(model.train(), mapping, (X,))
    else:
        prepared = backquant.prepare_fx(model.eval(), mapping, (X,))
    prepared(X)
    return backquant.convert_fx(prepared)


def searched(folder: Path) -> Any:
    model = copy.deepcopy(MODEL)
    return backquant.search(
        model, [X], "x86", budget={"min_sqnr": 10}, calibration=[X], times=folder
    )


CALLS: dict[str, Callable[[Path], Any]] = {
    "quantize": lambda folder: quantized(),
    "quantize, timed": lambda folder: backquant.quantize(copy.deepcopy(MODEL), X, calibration=[X]),
    "quantize by an export": lambda folder: quantized(capture="export"),
    "quantize with a recipe": lambda folder: quantized(recipe=["gptq", "bias-correction"]),
    "call": lambda folder: quantized()(X),
    "fx": lambda folder: flow(copy.deepcopy(MODEL)),
    "fx for training": lambda folder: flow(copy.deepcopy(MODEL), qat=True),
    "dynamic": lambda folder: backquant.api.quantize_dynamic(copy.deepcopy(MODEL), {nn.Linear}),
    "save and load": lambda folder: backquant.load(saved(folder)),
    "export to ONNX": lambda folder: backquant.export(
        quantized(backend="onnxruntime"), folder / "m.onnx", example_inputs=X
    ),
    "export to OpenVINO": lambda folder: backquant.export(
        quantized(backend="openvino"), folder / "m.xml", example_inputs=X
    ),
    "compare": lambda folder: backquant.compare(copy.deepcopy(MODEL), quantized(), [X]),
    "sensitivity": lambda folder: backquant.sensitivity(copy.deepcopy(MODEL), data=[X]),
    "search": searched,
    "conform": lambda folder: backquant.conform("native", entries=["ReLU6"], jobs=0, rounds=1),
    "explain": lambda folder: backquant.explain(copy.deepcopy(MODEL), X, backend="x86"),
    "backends": lambda folder: CliRunner().invoke(app, ["backends"]),
    "inspect": lambda folder: CliRunner().invoke(app, ["inspect", str(saved(folder))]),
}
FAILURES: dict[str, Callable[[Path], Any]] = {
    "quantize": lambda folder: backquant.quantize(copy.deepcopy(FAILS), X, calibration=[X]),
    "calibration": lambda folder: quantized(calibration=[X, X.double(), "x"]),
    "call": lambda folder: quantized()(X[:, :3]),
    "load": lambda folder: backquant.load(damaged(folder)),
    "export": lambda folder: backquant.export(quantized(backend="onnxruntime"), folder),
    "search": lambda folder: backquant.search(
        copy.deepcopy(MODEL), [X], "x86", budget={"max_drop": 0.1}, metric=lambda made: 1 / 0
    ),
    "sensitivity": lambda folder: backquant.sensitivity(copy.deepcopy(FAILS), data=[X]),
    "description": lambda folder: backquant.get_backend_config("no such"),
}


def saved(folder: Path) -> Path:
    backquant.save(quantized(), folder / "model.bq")
    return folder / "model.bq"


def damaged(folder: Path) -> Path:
    path = saved(folder)
    path.write_bytes(path.read_bytes()[:-9])
    return path


def changed(call: Callable[[], Any]) -> dict[str, Any]:
    before = state()
    call()
    after = state()
    return {name: told(before[name], after[name]) for name in before if before[name] != after[name]}


def told(before: Any, after: Any) -> Any:
    is_set = isinstance(before, frozenset)
    return (before - after, after - before) if is_set else (before, after)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_changes_nothing_else(name: str, tmp_path: Path) -> None:
    assert changed(lambda: CALLS[name](tmp_path)) == {}


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_changes_nothing_else(name: str, tmp_path: Path) -> None:
    def call() -> None:
        with pytest.raises(Exception):  # noqa: B017 - of whichever kind
            FAILURES[name](tmp_path)

    assert changed(call) == {}
