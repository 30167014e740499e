"""A package that computes something else than the reference model is not left there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import backquant
from backquant.backend_config import BackendConfig, QDQRules
from backquant.deploy.inductor import readback as wrong_numbers
from backquant.deploy.job import ExportJob
from backquant.deploy.portable import portable
from backquant.deploy.roundings import dithered
from backquant.errors import ExportError
from backquant.match.plan import Plan


@pytest.fixture(scope="module")
def job() -> ExportJob:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 8, generator=generator)
    layers = [torch.nn.Linear(8, 8, bias=False), torch.nn.ReLU(), torch.nn.Linear(8, 8, bias=False)]
    for layer in (layers[0], layers[2]):
        layer.weight.data = torch.randn(8, 8, generator=generator)
    model = backquant.quantize(
        torch.nn.Sequential(*layers).eval(), backend="inductor_x86", calibration=[x]
    )
    module = portable(model.graph_module, QDQRules())
    return ExportJob(module, (x,), {}, None, BackendConfig("b"), Plan("b"), {}, ())


@pytest.fixture
def gives(monkeypatch, job):
    """Let the package give the reference model's result, changed so."""

    def set_to(change):
        monkeypatch.setattr(
            torch._inductor, "aoti_load_package", lambda _path: lambda x: change(job.module(x))
        )

    return set_to


@pytest.mark.parametrize(
    ("name", "change"),
    [("halved", lambda y: y * 0.5), ("nan", lambda y: y / 0), ("shape", lambda y: y[:1])],
)
def test_wrong_numbers_are_refused(gives, job, tmp_path, snapshot, name, change):
    gives(change)
    with pytest.raises(ExportError) as caught:
        wrong_numbers.check_numbers(job, tmp_path)
    snapshot(name, caught.value)


def test_a_package_that_stops_is_refused(gives, job, tmp_path, snapshot):
    def stop(_y):
        raise RuntimeError("expected 6 inputs, got 2")

    gives(stop)
    with pytest.raises(ExportError) as caught:
        wrong_numbers.check_numbers(job, tmp_path)
    snapshot("stops", caught.value)


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_near_results_pass(gives, job, tmp_path, factor):
    gives(lambda y: y * factor)
    wrong_numbers.check_numbers(job, tmp_path)


def test_what_roundings_explain_passes(gives, job, tmp_path, monkeypatch):
    monkeypatch.setattr(wrong_numbers, "_NEAR", 200.0)
    gives(lambda _y: dithered(job)[0])
    wrong_numbers.check_numbers(job, tmp_path)


def test_a_size_that_the_package_fixes_is_found(gives, job, tmp_path, snapshot):
    free = replace(job, dynamic_shapes={"input": {0: "batch"}})
    gives(lambda y: y[:16])
    with pytest.raises(ExportError) as caught:
        wrong_numbers.check_numbers(free, tmp_path)
    snapshot("fixed", caught.value)
    wrong_numbers.check_numbers(job, tmp_path)
    bounded = replace(job, dynamic_shapes={"input": {0: "batch<=16"}})
    wrong_numbers.check_numbers(bounded, tmp_path)


def test_sizes_that_the_model_does_not_take_are_not_tried(gives, job, tmp_path):
    """The second axis is that of the layer's inputs."""
    gives(lambda y: y)
    wrong_numbers.check_numbers(replace(job, dynamic_shapes={"input": {1: "n"}}), tmp_path)
