from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import fx, nn

from backquant.backend_config import get_backend_config
from backquant.dtypes import QParams
from backquant.errors import UsageError
from backquant.lower import engine_info
from backquant.match.plan import Plan
from backquant.nn.quantized import reference as nnqr
from backquant.qconfig import QConfigMapping
from backquant.runtime import LoweredRecord, QuantizedModel
from backquant.runtime.boundary import as_integers


def recorded(**more):
    return LoweredRecord(Plan("x86"), get_backend_config("x86"), QConfigMapping(), **more)


@pytest.fixture
def model(tools):
    fc = nn.Linear(4, 3)

    def forward(self, x):
        return tools.qdq(self.fc(tools.qdq(x, tools.u8)), tools.u8)

    reference = tools.trace(forward, fc=nnqr.Linear.from_float(fc, tools.weight_qparams(fc)))
    lowered = tools.lower(reference)
    record = recorded(
        engine=engine_info("x86"), kernels=lowered.kernels, left_in_float=lowered.left_in_float
    )
    return QuantizedModel(lowered.graph_module, record)


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


class TestQuantizedInterface:
    @pytest.fixture
    def taking_integers(self, tools):
        reference = tools.trace(lambda self, x, y: torch.relu(x.float() + y))
        inputs = {0: QParams(0.5, 10, 0, 255, torch.uint8)}
        return QuantizedModel(reference, recorded(inputs=inputs))

    def test_quantized_tensors_become_integers(self, taking_integers):
        tensor = torch.quantize_per_tensor(torch.tensor([0.5, 2.0]), 0.5, 10, torch.quint8)
        for result in (
            taking_integers(tensor, 0),
            taking_integers(tensor.int_repr(), 0),
            taking_integers(x=tensor, y=0),
        ):
            assert result.tolist() == [11, 14]

    @pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32])
    def test_other_qparams_are_brought_to_the_models(self, dtype):
        tensor = torch.quantize_per_tensor(torch.tensor([1.0, -3.0]), 0.25, 20, dtype)
        asked = QParams(0.5, 10, 0, 127, torch.uint8)
        assert as_integers(tensor, asked).tolist() == [12, 4]

    def test_a_narrow_range_is_kept(self):
        tensor = torch.quantize_per_tensor(torch.tensor([100.0]), 0.5, 10, torch.quint8)
        assert as_integers(tensor, QParams(0.5, 10, 0, 127, torch.uint8)).tolist() == [127]

    def test_per_channel_tensors(self):
        tensor = torch.quantize_per_channel(
            torch.tensor([[1.0], [2.0]]),
            torch.tensor([0.5, 1.0]),
            torch.tensor([0, 0]),
            0,
            torch.quint8,
        )
        asked = QParams(0.5, 0, 0, 255, torch.uint8)
        assert as_integers(tensor, asked).tolist() == [[2], [4]]

    def test_floats_are_quantized_and_other_values_pass(self):
        asked, integers = QParams(0.5, 0, 0, 255, torch.uint8), torch.ones(2, dtype=torch.uint8)
        assert as_integers(torch.ones(2), asked).tolist() == [2, 2]
        assert as_integers(integers, asked) is integers and as_integers(3, asked) == 3


def test_preserved_attributes(tools):
    reference = tools.trace(lambda self, x: x)
    reference.meta["_user_preserved_attributes"] = {"tag": "v1", "plan": "mine"}
    model = QuantizedModel(reference, recorded())
    assert model.tag == "v1"
    assert model.plan == Plan("x86")  # its own names stand


def test_it_is_a_graph_module(model, capsys):
    assert isinstance(model, fx.GraphModule)
    modules = dict(model.named_modules())
    calls = [node for node in model.graph.nodes if node.op == "call_module"]
    assert calls and all(node.target in modules for node in calls)
    model.graph.lint()
    assert model.meta is model.graph_module.meta
    assert "self.fc" in model.print_readable(print_output=False)
    assert {node.op for node in model.graph.nodes} >= {"placeholder", "call_module", "output"}


def test_an_edited_graph_runs_as_it_stands(model):
    x = torch.randn(5, 4)
    before = model(x)
    model.recompile()
    assert torch.equal(model(x), before) and model._is_unchanged()
    output = model.graph.output_node()
    with model.graph.inserting_before(output):
        twice = model.graph.call_function(torch.mul, (output.args[0], 2))
    output.args = (twice,)
    assert torch.equal(model(x), before)  # as fx: until it is recompiled
    model.recompile()
    for edited in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(edited(x), 2 * before)
        assert torch.equal(fx.Interpreter(edited).run(x), 2 * before)
    output.args = (twice.args[0],)
    model.graph.erase_node(twice)
    model.recompile()
    assert torch.equal(model(x), before) and model._is_unchanged()


def test_a_child_that_was_replaced_runs(model):
    kernel, x = model.fc, torch.randn(5, 4)
    before = model(x)
    model.fc = nn.Linear(7, 3)
    with pytest.raises(UsageError, match="as it was edited, fails"):
        model(x)
    model.fc = kernel
    assert torch.equal(model(x), before)


def test_what_it_lacks_is_said_of_itself(model):
    with pytest.raises(AttributeError, match="'QuantizedModel' object has no attribute 'nothing'"):
        _ = model.nothing
    assert not hasattr(model, "forward_hooks")
    assert copy.deepcopy(model).fc is not model.fc
    assert set(model._modules) == {"fc"} and "fc.weight" in model.state_dict()
