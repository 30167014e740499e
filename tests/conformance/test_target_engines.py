"""Runtimes that ``export`` writes for, as engines: models in one file, read back and run one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.conformance import ConformanceVerdict as Verdict
from backquant.conformance import engines
from backquant.conformance.attempt import Setting
from backquant.conformance.engines import find_conformance_engine
from backquant.conformance.results import Trial
from backquant.conformance.run import claimed, claims, outcomes_of
from backquant.conformance.target_engines import joined_graphs
from backquant.errors import BackquantError, EngineError

# a product, what computes values, what is spelled anew for the sake of its kernel, what moves values
ENTRIES = {
    "onnxruntime": {
        "torch.nn.ReLU(torch.conv2d)",
        "operator.add",
        ".relu_()",
        "torch.concat",
        "torch.permute_copy",
    },
    "openvino": {"torch.nn.ReLU(torch.conv2d)", "torch.mul"},
}
KERNELS = {"onnxruntime": "QLinearConv", "openvino": "Convolution (u8)"}


@pytest.mark.parametrize("backend", ENTRIES)
def test_a_runtime_keeps_what_its_description_claims(backend: str) -> None:
    """The engine follows from the backend; integers are those of the reference, the kernel is named."""
    config = claimed(backquant.get_backend_config(backend))
    engine = find_conformance_engine(config, None)
    assert engine.name == backend and engine.versions().keys() > {"backquant", "torch"}
    found = accepted(config, engine, ENTRIES[backend])
    wrong = [each for each in found if each.verdict is not Verdict.CONFORMS]
    assert not wrong and len(found) >= 10
    assert all(each.elements and each.steps <= 1 for each in found)
    assert any(each.kernel.startswith(KERNELS[backend]) for each in found)


def accepted(config: Any, engine: Any, patterns: set[str]) -> list[Any]:
    """The outcomes of the recorded examples."""
    trials = [Trial(claim) for claim in claims(config) if claim.pattern in patterns]
    found = outcomes_of(trials, Setting(config, engine))
    return [outcome for _, outcome in found if outcome is not None]


def test_graphs_side_by_side() -> None:
    """Each reads its own inputs and weights, whatever they are called."""
    torch.manual_seed(0)
    models = [nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3), nn.ReLU())]
    joined = joined_graphs([torch.fx.symbolic_trace(model) for model in models])
    inputs = (torch.randn(1, 2), torch.randn(4, 2))
    for model, x, result in zip(models, inputs, joined(*inputs), strict=True):
        torch.testing.assert_close(result, model(x), rtol=0, atol=0)


def test_a_package_has_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from backquant.conformance.torch_engines import TorchEngine\nENGINE = TorchEngine('qnnpack')"
    (tmp_path / "mynpu.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    x86 = backquant.get_backend_config("x86")
    assert find_conformance_engine(x86, "mynpu").name == "qnnpack"
    with pytest.raises(EngineError, match="there is no engine 'mynpus'"):
        find_conformance_engine(x86, "mynpus")


def test_compiled_code_is_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the graphs that would be compiled, each called with its own inputs."""

    def interpreted(graph: Any, arguments: Any, *_: Any) -> Any:
        return lambda given: graph(*given)

    monkeypatch.setattr(engines, "compile_graph", interpreted)
    x86 = backquant.get_backend_config("x86")
    engine = find_conformance_engine(x86, "compiled")
    found = accepted(x86, engine, {"torch.nn.ReLU(torch.add)", "torch.nn.ReLU(torch.conv2d)"})
    assert {each.verdict for each in found} == {Verdict.CONFORMS}
    assert {each.kernel for each in found} == {
        "quantized.add_relu",
        "onednn.qconv2d_pointwise(relu)",
    }


def test_a_runtime_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("backquant.deploy.target._found", lambda module: module != "openvino")
    with pytest.raises(BackquantError, match="openvino, which is not installed"):
        backquant.conform("openvino", output=tmp_path)
