"""A file is called after it is written: every output, in changing sizes, and what differs is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import backquant
from backquant.deploy import find_target
from backquant.deploy.agreement import check_agreement
from backquant.deploy.job_of import job_of, reference_of

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


def _target(job: Any, change: Any, **more: Any) -> Any:
    made: list[_Runtime] = []

    def loaded(path: Path) -> _Runtime:
        del path
        made.append(_Runtime(job.module, change))
        return made[-1]

    return SimpleNamespace(name="acme", loaded=loaded, made=made, **more)


def test_equal_files_pass_and_sizes_rise_and_fall(job: Any) -> None:
    target = _target(job, lambda outputs, sizes: outputs)
    assert check_agreement(job, target, PATH) == ()
    assert target.made[0].sizes == [3, 7, 2, 7, 4]


def _small_head(outputs: list[Any], sizes: list[int]) -> list[Any]:
    del sizes
    return [outputs[0], outputs[1] * 1.5]


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
        check_agreement(job, _target(job, change), PATH)


def test_state_without_free_sizes(job: Any) -> None:
    def second_call(outputs: list[Any], sizes: list[int]) -> list[Any]:
        return outputs if len(sizes) < 3 else [2 * value for value in outputs]

    fixed = replace(job, dynamic_shapes=None)
    with pytest.raises(
        backquant.ExportError, match="the example inputs, called after inputs drawn anew"
    ):
        check_agreement(fixed, _target(fixed, second_call), PATH)


def test_shortcuts_of_a_cpu_are_noted(job: Any) -> None:
    target = _target(job, _small_head, exact=lambda path: _Runtime(job.module, lambda o, s: o))
    [note] = check_agreement(job, target, PATH)
    assert "output 1 differs" in note
    wrong = _target(job, _small_head, exact=lambda path: _Runtime(job.module, _small_head))
    with pytest.raises(backquant.ExportError, match="output 1 differs"):
        check_agreement(job, wrong, PATH)


def test_a_target_without_a_runtime_is_not_asked(job: Any) -> None:
    assert check_agreement(job, SimpleNamespace(name="acme"), PATH) == ()
