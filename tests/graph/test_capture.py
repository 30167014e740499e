"""Capture: PyTorch's names and scopes, an untouched model, errors that teach."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import CaptureError, ConfigError
from backquant.graph import GraphIndex, Scope, capture, verify
from backquant.nn.intrinsic import LinearReLU
from backquant.observe import MinMaxObserver


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return torch.relu(self.norm(self.fc(x)))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Inner()])
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.scale
        return x + torch.tensor([1.0, 2.0])


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


def names_of(model: nn.Module, **options: Any) -> list[str]:
    return [node.name for node in capture(model, **options).module.graph.nodes]


def test_names_and_scopes_are_pytorchs() -> None:
    from torch.ao.quantization.fx.tracer import QuantizationTracer

    model = Outer()
    tracer = QuantizationTracer([], [])
    expected = [node.name for node in tracer.trace(copy.deepcopy(model)).nodes]
    captured = capture(model)
    assert [node.name for node in captured.module.graph.nodes] == expected
    assert {n: (s.path, s.module_type) for n, s in captured.scopes.items()} == dict(
        tracer.node_name_to_scope
    )
    assert captured.scopes["relu_1"] == Scope("blocks.1", Inner)
    assert captured.scopes["relu_1"].parent == "blocks"


def snapshot(model: nn.Module) -> Any:
    return (
        repr(model),
        {name: id(value) for name, value in model.named_parameters(remove_duplicate=False)},
        {name: value.clone() for name, value in model.named_buffers()},
        [
            (name, module.training, len(module._forward_hooks))
            for name, module in model.named_modules()
        ],
        sorted(vars(model)),
    )


@pytest.mark.parametrize("training", [True, False])
def test_model_stays_as_it_is(training: bool) -> None:
    model = Outer().train(training)
    model.blocks[0].register_forward_hook(lambda module, args, output: None)
    before = snapshot(model)
    captured = capture(model)
    captured.module.train(not training)
    captured.module.get_submodule("blocks.0").fc = nn.Identity()
    captured.module.get_submodule("blocks.1.norm").register_forward_hook(print)
    captured.module.get_submodule("blocks.1.norm").register_buffer("extra", torch.zeros(1))
    after = snapshot(model)
    assert before[0] == after[0]
    assert before[1:2] == after[1:2]
    assert before[3:] == after[3:]
    assert all(torch.equal(before[2][name], after[2][name]) for name in before[2])


def test_failed_capture_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Branching())
    before = snapshot(model)
    with pytest.raises(CaptureError):
        capture(model)
    assert snapshot(model)[0] == before[0]
    assert snapshot(model)[-1] == before[-1]
    assert torch.equal(nn.ReLU()(torch.ones(1)), torch.ones(1))  # no patch is left


def test_tensors_are_the_models_own_and_outputs_equal() -> None:
    model = Outer().eval()
    captured = capture(model)
    assert captured.module.get_submodule("blocks.0.fc").weight is model.blocks[0].fc.weight
    assert captured.module.get_submodule("blocks.0.fc") is not model.blocks[0].fc
    x = torch.randn(3, 2)
    assert torch.equal(captured.module(x), model(x))
    verify(captured.module, after="capture")


def test_training_flags_are_kept() -> None:
    model = Outer().train()
    model.blocks[1].eval()
    module = capture(model).module
    flags = {name: m.training for name, m in module.named_modules()}
    assert flags["blocks.0"] and flags["blocks.0.norm"] and flags[""]
    assert not flags["blocks.1"] and not flags["blocks.1.fc"]


def test_shared_modules_stay_shared() -> None:
    inner = Inner()
    captured = capture(nn.Sequential(inner, inner))
    index = GraphIndex(captured.module)
    assert [node.name for node in index.callers["0.fc"]] == ["_0_fc", "_0_fc_1"]


def test_leaves() -> None:
    class Wrapped(nn.Sequential):
        pass

    fused = LinearReLU(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(fused, MinMaxObserver(), Wrapped(nn.ReLU()), nn.Dropout())
    assert names_of(model) == ["input_1", "_0", "_1", "_2_0", "_3", "output"]


def test_non_traceable_modules_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Branching())
    expected = ["input_1", "_0", "_1", "output"]
    assert names_of(model, non_traceable_names=["1"]) == expected
    assert names_of(model, non_traceable_classes=[Branching]) == expected


def test_control_flow_names_module_line_and_fix() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Branching()))
    with pytest.raises(CaptureError) as caught:
        capture(model)
    error = caught.value
    assert "cannot be traced" in error.what
    assert "module '1.0' (Branching)" in error.where
    assert "test_capture.py" in error.where
    assert "if x.sum() > 0:" in error.where
    assert "set_non_traceable_module_names(['1.0'])" in error.fix


def test_control_flow_at_the_top() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Branching())
    assert caught.value.where.startswith("Branching, ")
    assert "submodule" in caught.value.fix


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [y for y in x],  # noqa: C416
        lambda x: x[: len(x)],
        lambda x: sum(i for i in range(x.size(0))),
        lambda x: x.nope + {}["missing"],
    ],
)
def test_every_failure_is_a_capture_error(function: Any) -> None:
    class Net(nn.Module):
        def forward(self, x):
            return function(x)

    with pytest.raises(CaptureError, match="cannot be traced"):
        capture(Net())


def test_unregistered_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(2, 2)]

        def forward(self, x):
            return self.layers[0](x)

    with pytest.raises(CaptureError, match="not registered") as caught:
        capture(Net())
    assert "ModuleList" in caught.value.fix


def test_modules_made_in_forward_are_what_they_compute() -> None:
    """As pytorch_tabnet and g_mlp_pytorch have them: they have no tensors that could be registered."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])

        def forward(self, x):
            return nn.Sequential(nn.ReLU(), *self.layers, nn.Flatten())(x)

    model, x = Net(), torch.randn(2, 3, 4)
    module = capture(model).module
    calls = [node for node in module.graph.nodes if node.op.startswith("call_")]
    assert [str(node.target) for node in calls[1:]] == ["layers.0", "layers.1", "flatten"]
    module.recompile()
    assert torch.equal(module(x), model(x))


def test_attributes_that_forward_assigns_are_read_as_they_were() -> None:
    """As basicsr's EDSR does: the graph read a value of the trace, and fusing failed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.mean = nn.Conv2d(3, 3, 3), torch.ones(1, 3, 1, 1)

        def forward(self, x):
            self.mean = self.mean.type_as(x)
            self.last = x
            return self.conv((x - self.mean) * 255.0) / 255.0 + self.mean

    torch.manual_seed(0)
    model, x = Net().eval(), torch.rand(1, 3, 8, 8)
    captured = capture(model)
    assert isinstance(captured.module.mean, torch.Tensor) and not hasattr(model, "last")
    [note] = captured.notes  # of a model that keeps state there, nothing else would tell
    assert note.startswith("forward assigns to 'mean'")
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    assert note in quantized.report.notes
    with torch.no_grad():
        noise = (quantized(x) - model(x)).square().sum() / model(x).square().sum()
    assert float(noise) < 1e-3


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="no module 'blokcs'") as caught:
        capture(Outer(), non_traceable_names=["blokcs"])
    assert "'blocks'" in caught.value.fix
    with pytest.raises(ConfigError, match="sequence of names"):
        capture(Outer(), non_traceable_names="blocks")
    with pytest.raises(ConfigError, match="no attribute"):
        capture(Outer(), preserved_attributes=["nope"])


def test_preserved_attributes() -> None:
    model = Outer()
    model.words = ["a", "b"]
    module = capture(model, preserved_attributes=["words"]).module
    assert module.words == ["a", "b"]
    assert copy.deepcopy(module).words == ["a", "b"]


def test_captured_graphs_pickle() -> None:
    module = capture(Outer().eval()).module
    again = pickle.loads(pickle.dumps(module))
    x = torch.randn(2, 2)
    assert torch.equal(again(x), module(x))


def test_float_functional_is_its_operator() -> None:
    from torch.ao.nn.quantized import FloatFunctional

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plus = FloatFunctional()

        def forward(self, x):
            return self.plus.add(x, x)

    assert names_of(Net()) == ["x", "add", "output"]


def test_parametrized_and_hooked_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).eval()
    nn.utils.parametrizations.weight_norm(model[0])
    captured = capture(model)
    x = torch.randn(1, 2)
    torch.testing.assert_close(captured.module(x), model(x))
    assert (
        GraphIndex(captured.module).key(captured.module.graph.find_nodes(op="call_module")[0]).op
        is nn.Linear
    )


def test_lookup_of_parameters_is_no_search() -> None:
    """PyTorch's tracer walks all parameters at each use of one."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.zeros(1) for _ in range(50))
            self.walks = 0

        def named_parameters(self, *args, **kwargs):
            self.walks += 1
            return super().named_parameters(*args, **kwargs)

        def forward(self, x):
            for weight in self.weights:
                x = x + weight
            return x

    model = Many()
    module = capture(model).module
    assert len(module.graph.find_nodes(op="get_attr")) == 50
    assert model.walks <= 1


class Counted(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


def test_a_trace_does_not_write_the_buffers_of_the_model() -> None:
    model = Counted()
    buffer = model.calls
    captured = capture(model)
    assert model.calls is buffer
    assert float(buffer) == 0
    assert dict(captured.module.named_parameters())["linear.weight"] is model.linear.weight
