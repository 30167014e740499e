"""What OpenVINO computes wrongly on AMX is not exported without a word."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import fx, nn

from backquant.backend_config import BackendConfig
from backquant.deploy.exported import TargetKernel
from backquant.deploy.job import ExportJob
from backquant.deploy.openvino import workarounds as amx
from backquant.errors import ExportError
from backquant.match.plan import Plan

CONVOLUTION = TargetKernel("Convolution", ("conv",), "i8", True)


@pytest.fixture
def job() -> ExportJob:
    module = fx.symbolic_trace(nn.ReLU())
    x = torch.linspace(-1, 1, 32)
    return ExportJob(module, (x,), {}, None, BackendConfig("b"), Plan("b"), {}, ())


@pytest.fixture
def gives(monkeypatch, job):
    """Let both runs of OpenVINO give these multiples of the right result; how often they were asked."""
    asked = []

    def set_to(here, without):
        right = job.module(*job.args).numpy()

        def answer(factor):
            asked.append(factor)
            return None if factor is None else [np.float32(factor) * right]

        monkeypatch.setattr(amx, "_uses_amx", lambda: True)
        monkeypatch.setattr(amx, "_outputs", lambda *_: answer(here))
        monkeypatch.setattr(amx, "_outputs_without_amx", lambda *_: answer(without))
        return asked

    return set_to


def test_numbers_that_are_right_without_amx_only_are_refused(gives, job, tmp_path, snapshot):
    gives(0.0, 1.01)
    with pytest.raises(ExportError) as caught:
        amx.check_amx(job, tmp_path, [CONVOLUTION])
    snapshot("wrong_on_amx", caught.value)


@pytest.mark.parametrize(
    ("here", "without", "runs"),
    [
        (1.01, 0.0, 1),  # near: nothing to ask
        (0.5, 0.5, 2),  # far, and not for AMX
        (None, 1.0, 1),  # it does not take the inputs
        (0.5, None, 2),
    ],
)
def test_all_else_passes(gives, job, tmp_path, here, without, runs):
    asked = gives(here, without)
    amx.check_amx(job, tmp_path, [CONVOLUTION])
    assert len(asked) == runs


def test_nothing_runs_where_nothing_is_convolved_on_integers(gives, job, tmp_path):
    asked = gives(0.0, 1.0)
    amx.check_amx(job, tmp_path, [TargetKernel("FullyConnected", ("fc",), "i8", True)])
    assert not asked


def test_a_limit_switches_it_off(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")
    assert not amx._uses_amx()
