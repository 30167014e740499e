"""Captures replace functions of torch for their own thread only, and put them back."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import backquant
from backquant.graph import capture
from backquant.graph.own_thread import (
    capture_in_own_thread,
    printing_nowhere,
    without_attention_fastpath,
)


def in_other_thread(function: Callable[[], Any]) -> Any:
    """What ``function`` gives in a thread of its own; what it raises is raised here."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((function(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert found, "the other thread waits"
    value, error = found[0]
    if error is not None:
        raise error
    return value


class CallsAnother(nn.Module):
    """While it is traced, another thread calls what ``other`` gives."""

    def __init__(self, other: Callable[[], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if isinstance(x, fx.Proxy):
            in_other_thread(self.other)
        return x


def test_a_module_that_another_thread_calls_is_not_traced() -> None:
    other = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    results: list[torch.Tensor] = []
    captured = capture(CallsAnother(lambda: results.append(other(torch.ones(1, 3)))))
    operations = [node.op for node in captured.module.graph.nodes]
    assert operations == ["placeholder", "call_module", "output"]
    assert torch.equal(results[0], other(torch.ones(1, 3)))


def test_torch_alone_traces_the_other_thread_too() -> None:
    """Why this exists; when it fails, torch has mended it."""
    other = nn.Linear(3, 2)
    with pytest.raises(NameError, match="not installed as a submodule"):
        fx.symbolic_trace(CallsAnother(lambda: other(torch.ones(1, 3))))


def test_everything_is_put_back_after_a_failure() -> None:
    before = nn.Module.__call__, nn.Module.__getattr__, torch.compiler.is_exporting

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if bool(x.sum() > 0) else -x

    for _ in range(2):
        try:
            capture(Fails())
        except Exception as error:
            assert "traced" in str(error)
        assert (nn.Module.__call__, nn.Module.__getattr__, torch.compiler.is_exporting) == before


def test_exporting_is_no_news_to_other_threads() -> None:
    seen: list[tuple[bool, bool]] = []

    class QConfigRequest(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            here = torch.compiler.is_exporting()
            seen.append((here, in_other_thread(torch.compiler.is_exporting)))
            return x + 1

    with capture_in_own_thread():
        torch.export.export(QConfigRequest(), (torch.ones(2),), strict=False)
    assert set(seen) == {(True, False)}


def test_two_captures_wait_for_each_other() -> None:
    order: list[str] = []
    inside = threading.Event()

    def second() -> None:
        inside.wait(30)
        with capture_in_own_thread():
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with capture_in_own_thread(), capture_in_own_thread():
        inside.set()
        thread.join(0.05)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_attention_has_its_fastpath_in_other_threads() -> None:
    with without_attention_fastpath():
        assert not torch.backends.mha.get_fastpath_enabled()
        assert in_other_thread(torch.backends.mha.get_fastpath_enabled)
    assert torch.backends.mha.get_fastpath_enabled()


def test_other_threads_go_on_printing(monkeypatch: Any) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    with printing_nowhere():
        print("dropped")
        in_other_thread(lambda: print("kept"))
    print("after")
    assert stream.getvalue() == "kept\nafter\n"


class Moving(nn.Module):
    """As the router of transformers' Switch Transformers: it makes sure of the dtype of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fc = self.fc.to(torch.float32)
        return self.fc(x)


def test_moves_that_change_nothing_do_nothing_in_an_export() -> None:
    model, original = Moving().eval(), nn.Module.to
    with capture_in_own_thread():
        program = torch.export.export(model, (torch.zeros(2, 4),), strict=False)
        assert model.to("cpu") is model
        assert nn.Linear(2, 2).to(torch.float64).weight.dtype is torch.float64
    assert nn.Module.to is original
    x = torch.randn(2, 4)
    assert torch.equal(program.module()(x), model(x))


def test_a_model_that_moves_a_layer_is_quantized_and_exported(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Moving()).eval(), torch.randn(6, 4)
    result = backquant.quantize(model, x, backend="onnxruntime", calibration=[x], slower="keep")
    assert result.report.coverage == 1.0
    backquant.export(result, tmp_path / "m.onnx", example_inputs=x)
