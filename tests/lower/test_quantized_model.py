from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from backquant.backend_config import get_backend_config
from backquant.lower import QuantizedModel, engine_info
from backquant.match.plan import Plan
from backquant.nn.quantized import reference as nnqr


@pytest.fixture
def model(tools):
    fc = nn.Linear(4, 3)

    def forward(self, x):
        return tools.qdq(self.fc(tools.qdq(x, tools.u8)), tools.u8)

    reference = tools.trace(forward, fc=nnqr.Linear.from_float(fc, tools.weight_qparams(fc)))
    lowered = tools.lower(reference)
    return QuantizedModel(
        lowered.graph_module,
        plan=Plan("x86"),
        backend_config=get_backend_config("x86"),
        engine=engine_info("x86"),
        kernels=lowered.kernels,
        left_in_float=lowered.left_in_float,
    )


def test_it_says_what_it_runs_on(model):
    assert model.engine.name == "x86"
    assert [use.kernel for use in model.kernels] == ["onednn.qlinear_pointwise"]
    assert model.left_in_float == ()
    assert model.report is None
    assert "1 kernels, 0 left in float" in repr(model)
    assert model.audit().integer_kernels == 1


def test_it_never_trains(model):
    model.train()
    assert not model.training
    assert not any(child.training for child in model.modules())
    x = torch.randn(2, 4, requires_grad=True)
    assert not model(x).requires_grad


def test_copies_compute_the_same(model):
    x = torch.randn(5, 4)
    expected = model(x)
    other = copy.deepcopy(model)
    assert torch.equal(other(x), expected)
    assert (other.plan, other.engine, other.kernels) == (model.plan, model.engine, model.kernels)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), expected)


def test_arguments_pass_as_they_are(model):
    x = torch.randn(5, 4)
    assert torch.equal(model(x=x), model(x))


def test_the_graph_module_pickles(model):
    x = torch.randn(5, 4)
    again = pickle.loads(pickle.dumps(model.graph_module))
    assert torch.equal(again(x), model(x))
