"""Two captures become one graph; what differs is found and placed."""

from __future__ import annotations

import pickle
from functools import partial

import torch
import torch.nn.functional as F
from torch import fx, nn

from backquant.graph import (
    GraphIndex,
    ModeValue,
    capture,
    capture_for_training,
    settle_mode_values,
)
from backquant.graph.by_mode import ByMode


class Inner(nn.Module):
    """Mode in a keyword, in a nested list, in a slice; no parameter of its own."""

    def forward(self, x):
        x = F.dropout(x, p=0.5, training=self.training)
        x = torch.cat([x, x * (2.0 if self.training else 3.0)], 1)
        return x[:, : 2 if self.training else 1]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Identity(), Inner())
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.body(self.fc(x))


def test_every_place_of_an_argument_is_found():
    captured, difference = capture_for_training(Outer(), capture)
    assert difference == ""
    values = {n: m for n, m in captured.module.named_modules() if isinstance(m, ModeValue)}
    assert sorted(values) == [f"body.1.mode_value_{i}" for i in range(3)]
    assert {(m.in_training, m.in_evaluation) for m in values.values()} == {
        (True, False),
        (2.0, 3.0),
        (2, 1),
    }


def test_it_computes_what_the_model_computes_in_each_mode():
    model = Outer()
    module = capture_for_training(model, capture).captured.module
    x = torch.randn(3, 4)
    for mode in (True, False, True):
        model.train(mode), module.train(mode)
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(module(x), expected)


def test_scopes_and_flags():
    model = Outer()
    model.body[1].eval()
    captured = capture_for_training(model, capture).captured
    reads = [n for n in captured.module.graph.nodes if "mode_value" in n.name]
    assert [captured.scopes[n.name].module_type for n in reads] == [ModeValue] * 3
    assert [captured.scopes[n.name].parent for n in reads] == ["body.1"] * 3
    flags = {n: m.training for n, m in captured.module.named_modules() if n.startswith("body.1")}
    assert flags and not any(flags.values())
    assert captured.module.body.training


def test_they_are_no_tensors():
    module = capture_for_training(Outer(), capture).captured.module
    index = GraphIndex(module)
    reads = [n for n in module.graph.nodes if "mode_value" in n.name]
    assert all(index.has_no_tensors(n) for n in reads)


def test_without_a_difference_the_graph_is_that_of_one_capture():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2))
    calls = []

    def counted(each):
        calls.append(each.training)
        return capture(each)

    captured, difference = capture_for_training(model, counted)
    assert (difference, len(calls)) == ("", 2)
    assert captured.module.code == capture(model).module.code
    assert all(m.training for m in captured.module.modules())


def test_flags_of_both_kinds_take_a_third_capture():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval())
    captured = capture_for_training(model, capture).captured
    assert [captured.module.get_submodule(n).training for n in "01"] == [True, False]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.aux = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.aux(self.fc(x)) if self.training else self.fc(x)


def test_a_difference_in_structure_is_reported():
    captured, difference = capture_for_training(Branching().eval(), capture)
    assert captured.module.code == capture(Branching().eval()).module.code
    assert "evaluation mode" in difference and "'aux'" in difference and "'output'" in difference
    longer = capture_for_training(Branching(), capture).captured
    assert "aux" in longer.module.code


def test_a_mode_that_cannot_be_captured_is_reported():
    class Half(nn.Module):
        def forward(self, x):
            return x + 1 if self.training or x.sum() > 0 else x

    difference = capture_for_training(Half(), capture).difference
    assert "training mode" in difference and "cannot be traced" in difference


def test_the_model_is_not_changed(unchanged):
    model = Outer()
    with unchanged(model):
        capture_for_training(model, capture).captured.module.eval()


def test_settled_graphs_hold_the_values_of_evaluation():
    module = capture_for_training(Outer(), capture).captured.module
    settle_mode_values(module)
    module.recompile()
    assert "mode_value" not in module.code
    assert module.code == capture(Outer().eval()).module.code


def test_other_modules_are_left_alone_by_settling():
    module = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    before = module.code
    settle_mode_values(module)
    module.recompile()
    assert module.code == before


class DropPath(nn.Module):
    """As packages write it: another way through ``forward`` in each mode."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if self.rate == 0.0 or not self.training:
            return x
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(1 - self.rate) / (1 - self.rate)


class Halved(nn.Module):
    def forward(self, x):
        return x if self.training else (x * 2).mean(0, keepdim=True)


class Residual(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in parts)
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for layer, part in zip(self.layers, self.parts, strict=True):
            x = x + part(layer(x)) * (1 if getattr(part, "rate", 0) < 0.9 else 0)
        return x


def test_parts_without_parameters_keep_both_graphs():
    model = Residual(DropPath(0.0), DropPath(0.5), nn.Sequential(DropPath(0.3)), Halved())
    captured, difference = capture_for_training(model, capture)
    assert difference == ""
    kept = [path for path, part in captured.module.named_modules() if isinstance(part, ByMode)]
    assert kept == ["parts.1", "parts.2.0", "parts.3"]
    assert [captured.scopes[name].path for name in ("parts_1", "parts_3")] == ["parts.1", "parts.3"]
    x = torch.randn(64, 4)
    for module in (captured.module, pickle.loads(pickle.dumps(captured.module))):
        for mode in (True, False, True):
            model.train(mode), module.train(mode)
            torch.manual_seed(0)
            expected = model(x)
            torch.manual_seed(0)
            assert torch.equal(module(x), expected)
    assert not any(isinstance(part, ByMode) for part in model.modules())


def test_a_part_of_its_own_mode_keeps_it():
    model = Residual(DropPath(0.5), DropPath(0.5))
    model.parts[1].eval()
    module = capture_for_training(model, capture).captured.module
    flags = {path: part.training for path, part in module.named_modules()}
    assert flags["parts.0"] and not flags["parts.1"] and not flags["parts.1.in_training"]


def test_what_passes_its_input_on_in_evaluation_is_gone_when_settled():
    module = capture_for_training(Residual(DropPath(0.5), Halved()), capture).captured.module
    settle_mode_values(module)
    calls = [str(node.target) for node in module.graph.nodes if node.op == "call_module"]
    assert calls == ["layers.0", "layers.1", "parts.1"]
    module.recompile()
    module.eval()
    assert module(torch.ones(2, 4)).shape == (2, 4)


def test_parts_with_parameters_do_not():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.scale if self.training else x

    captured, difference = capture_for_training(Residual(DropPath(0.5), Scaled()), capture)
    assert "in training mode" in difference
    assert not any(isinstance(part, ByMode) for part in captured.module.modules())


def test_a_model_that_reads_more_of_a_part_than_numbers_says_so():
    class Reads(Residual):
        def forward(self, x):
            return super().forward(x) + self.parts[0].extra().sum()

    class Path(DropPath):
        def extra(self):
            return torch.ones(1)

    captured, difference = capture_for_training(Reads(Path(0.5)), capture)
    assert "in training mode" in difference
    assert captured.module(torch.ones(2, 4)).shape == (2, 4)


def test_a_part_that_asks_for_sizes_is_both_graphs_by_the_example():
    """As vit_pytorch's dropped paths do; they dropped in evaluation, too."""

    class BySample(DropPath):
        def forward(self, x):
            if not self.training:
                return x
            kept = torch.rand((x.shape[0], *(1,) * (x.ndim - 1))) > self.rate
            return x * kept

    model, x = Residual(BySample(0.5)), torch.ones(64, 4)
    how = partial(capture, example_inputs=(x,))
    assert "in training mode" in capture_for_training(model, how).difference
    captured, difference = capture_for_training(model, how, (x,))
    assert difference == ""
    for mode in (True, False):
        model.train(mode), captured.module.train(mode)
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(captured.module(x), expected)
    assert not any(part._forward_pre_hooks for part in model.modules())
