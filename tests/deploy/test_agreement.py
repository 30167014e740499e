"""A file is called after it is written: every output, in changing sizes, and what differs is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.snapshots import compare as snapshot
from torch import nn

import backquant
from backquant.deploy import find_target
from backquant.deploy.executorch import ExecuTorchTarget
from backquant.deploy.job_of import job_of, reference_of
from backquant.deploy.overflow import halved
from backquant.deploy.run import Agreement, check_agreement
from backquant.lower.machine import machine_facts
from backquant.lower.qdq import is_quantize

PATH = Path("model.onnx")


class TwoHeads(nn.Module):
    """One large output, one that is 100,000 times smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.fc(x)
        return y, y.abs() * 1e-5


@pytest.fixture(scope="module")
def job() -> Any:
    torch.manual_seed(0)
    batches = [torch.randn(4, 8) for _ in range(3)]
    quantized = backquant.quantize(TwoHeads().eval(), backend="onnxruntime", calibration=batches)
    target = find_target("onnx", PATH)
    return job_of(reference_of(quantized, target), (batches[0],), {}, {"x": {0: "batch<=16"}}, {})


class _Runtime:
    """Computes what ``model`` does, changed by ``change(outputs, sizes so far)``."""

    def __init__(self, model: Any, change: Any) -> None:
        self.model, self.change, self.sizes = model, change, []
        self.inputs = {"x": [None, 8]}

    def run(self, inputs: list[Any]) -> list[Any]:
        self.sizes.append(len(inputs[0]))
        with torch.no_grad():
            outputs = [value.numpy().copy() for value in self.model(torch.as_tensor(inputs[0]))]
        return self.change(outputs, self.sizes)


class _Acme(ExecuTorchTarget):
    """Loads a runtime that computes what ``job`` says, changed by ``change``."""

    name = "acme"

    def __init__(self, job: Any, change: Any) -> None:
        self.runtime = _Runtime(job.module, change)

    def loaded(self, path: Path) -> Any:
        del path
        return self.runtime

    def write(self, job: Any, path: Path) -> Any:
        del path
        self.runtime = _Runtime(job.module, self.runtime.change)


class _WithExact(_Acme):
    """``halved``: what the files written after the first compute."""

    def __init__(self, job: Any, change: Any, exact: Any, halved: Any = None) -> None:
        super().__init__(job, change)
        self.right, self.halved = _Runtime(job.module, exact), halved or change

    def exact(self, path: Path) -> Any:
        del path
        return self.right

    def write(self, job: Any, path: Path) -> Any:
        del path
        self.runtime = _Runtime(job.module, self.halved)


def test_equal_files_pass_and_sizes_rise_and_fall(job: Any) -> None:
    target = _Acme(job, lambda outputs, sizes: outputs)
    assert check_agreement(job, target, PATH).sqnr == {"output 0": 120.0, "output 1": 120.0}
    assert target.runtime.sizes == [3, 7, 2, 7]


def _small_head(outputs: list[Any], sizes: list[int]) -> list[Any]:
    del sizes
    return [outputs[0], outputs[1] * 1.6]


def _remembers(outputs: list[Any], sizes: list[int]) -> list[Any]:
    if sizes[-1] > sizes[0]:
        outputs[0][sizes[0] :] = outputs[0][0]
    return outputs


def _one_answer(outputs: list[Any], sizes: list[int]) -> list[Any]:
    del sizes
    return [np.broadcast_to(value[:1], value.shape).copy() for value in outputs]


def _fewer(outputs: list[Any], sizes: list[int]) -> list[Any]:
    del sizes
    return outputs[:1]


@pytest.mark.parametrize("change", [_small_head, _remembers, _one_answer, _fewer])
def test_what_differs_is_refused(job: Any, change: Any) -> None:
    with pytest.raises(backquant.ExportError, match="acme computes something else"):
        check_agreement(job, _Acme(job, change), PATH)


def test_roundings_pass(job: Any) -> None:
    def noisy(outputs: list[Any], sizes: list[int]) -> list[Any]:
        del sizes
        return [value * 1.05 for value in outputs]

    assert min(check_agreement(job, _Acme(job, noisy), PATH).sqnr.values()) > 20


def test_fixed_sizes_are_called_with_other_values(job: Any) -> None:
    fixed = replace(job, dynamic_shapes=None)
    with pytest.raises(backquant.ExportError, match="on inputs drawn anew"):
        check_agreement(fixed, _Acme(fixed, _one_answer), PATH)


def _same(outputs: list[Any], sizes: list[int]) -> list[Any]:
    del sizes
    return outputs


@pytest.mark.parametrize("overflows", [True, False])
def test_shortcuts_of_a_cpu_are_noted(
    job: Any, overflows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are those of the file as it runs here."""
    monkeypatch.setattr("backquant.deploy.run.overflows_here", lambda: overflows)
    found = check_agreement(job, _WithExact(job, _small_head, _same, _same), PATH)
    assert "output 1 differs" in found.notes[0] and len(found.notes) == 1
    assert found.sqnr["output 1"] < 10 < found.sqnr["output 0"]
    with pytest.raises(backquant.ExportError, match="output 1 differs"):
        check_agreement(job, _WithExact(job, _small_head, _small_head), PATH)


def test_what_no_overflow_explains_is_refused(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right without integer kernels, wrong with them, also where no sum can overflow."""
    monkeypatch.setattr("backquant.deploy.run.overflows_here", lambda: True)
    with pytest.raises(backquant.ExportError, match="output 1 differs"):
        check_agreement(job, _WithExact(job, _small_head, _same), PATH)


class Several(nn.Module):
    """Two read what ``body`` gives: OpenVINO scales it twice for one, unless files prevent that."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, bias=False)
        self.head = nn.Conv2d(4, 6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(self.stem(x).relu())
        part = torch.max_pool2d(y, 2) + nn.functional.leaky_relu(y)[:, :, ::2, ::2]
        return self.head(part), torch.sin(y)


def test_a_wrong_rewrite_is_refused_and_the_fix_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mend in ("keep_zero_biases", "separate_weights"):
        monkeypatch.setattr(f"backquant.deploy.openvino.{mend}", lambda model: None)
    torch.manual_seed(0)
    x = torch.rand(2, 3, 16, 16) - 0.1
    qconfig_mapping = backquant.default_mapping("openvino")

    def exported() -> Any:
        model = backquant.quantize(
            Several().eval(),
            backend="openvino",
            calibration=[x, 2.5 * x],
            qconfig_mapping=qconfig_mapping,
        )
        axes = {"x": {0: "batch"}}
        return backquant.export(
            model, tmp_path / "m.xml", example_inputs=x, dynamic_shapes=axes, require=0.0
        )

    with pytest.raises(backquant.ExportError, match="computes something else") as caught:
        exported()
    assert "body, called after" in caught.value.where
    eval(caught.value.fix.partition(" in quantize")[0])
    assert min(exported().sqnr.values()) > 60


def test_integers_of_half_the_size_fit_into_16_bits(job: Any) -> None:
    made = halved(job)
    before, after = job.module.state_dict(), made.module.state_dict()
    assert before["fc.weight"].abs().max() > 64 >= after["fc.weight"].abs().max()
    x = torch.randn(4, 8)
    error = (made.module(x)[0] - job.module(x)[0]).norm() / job.module(x)[0].norm()
    assert 0 < error < 0.05
    [first, again] = (
        [n.args[1:3] for n in m.module.graph.nodes if is_quantize(n)] for m in (job, made)
    )
    assert [(2 * scale, (zero_point + 1) // 2) for scale, zero_point in first] == again


@pytest.mark.parametrize(("has_vnni", "notes"), [(False, 1), (True, 0)])
def test_what_sums_of_16_bits_cost_is_said_with_the_fix(
    job: Any, has_vnni: bool, notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = replace(machine_facts(), architecture="x86_64", capabilities={"avx512_vnni": has_vnni})
    monkeypatch.setattr("backquant.deploy.overflow.machine_facts", lambda: facts)
    lossy = _WithExact(job, lambda o, s: [value * 1.05 for value in o], lambda o, s: o)
    found = check_agreement(job, lossy, PATH).notes
    assert len(found) == notes
    assert all(
        "beside the reference model 26.0 dB" in one and "weight_bits=7" in one for one in found
    )


def test_weights_of_seven_bits_are_half_as_large() -> None:
    mapping = backquant.default_mapping("onnxruntime", weight_bits=7)
    model, data = nn.Sequential(nn.Linear(8, 4)).eval(), [torch.randn(4, 8)]
    made = backquant.quantize(
        model, backend="onnxruntime", calibration=data, qconfig_mapping=mapping
    )
    weights = [v for v in made.state_dict().values() if getattr(v, "dtype", None) == torch.int8]
    assert weights and all(v.min() >= -64 and v.max() <= 63 for v in weights)
    with pytest.raises(backquant.UsageError, match="8 is no smaller range") as caught:
        backquant.default_mapping("onnxruntime", weight_bits=8)
    snapshot(Path(__file__), "weight-bits", str(caught.value))


def test_a_target_without_a_runtime_is_not_asked(job: Any) -> None:
    assert check_agreement(job, find_target("tensorrt", Path("model.onnx")), PATH) == Agreement()


def test_a_file_that_no_call_reached_is_said_to_be_uncompared(job: Any) -> None:
    def refuses(outputs: list[Any], sizes: list[int]) -> list[Any]:
        raise ValueError("no such size")

    assert check_agreement(job, _Acme(job, refuses), PATH).notes == (
        "nothing was compared in acme: 4 calls were tried",
    )
