"""Custom modules: float to observed to quantized, against PyTorch's where it can."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as nnq
import torch.ao.nn.quantized.dynamic as nnqd
from torch import fx, nn

import backquant as bq
from backquant.errors import ConfigError
from backquant.match import MatchKind, Outcome
from backquant.prepare import prepared_state


class Mine(nn.Module):
    """A user's module, and its classes as they are written for PyTorch."""

    def __init__(self, linear: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = linear or nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Observed(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x)

    @classmethod
    def from_float(cls, module):
        assert module.qconfig is not None
        observed = cls(module.linear)
        observed.qconfig = module.qconfig
        return observed


class Quantized(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x)

    @classmethod
    def from_observed(cls, observed):
        assert observed.qconfig is not None
        observed.linear.activation_post_process = observed.activation_post_process
        return cls(nnq.Linear.from_float(observed.linear))


class Dynamic(Quantized):
    @classmethod
    def from_observed(cls, observed):
        observed.linear.qconfig = observed.qconfig
        return cls(nnqd.Linear.from_float(observed.linear))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.mine = Mine()
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.mine(self.first(x)))


def prepare_custom(config: Any) -> Any:
    return config.PrepareCustomConfig().set_float_to_observed_mapping(Mine, Observed)


def convert_custom(config: Any) -> Any:
    return config.ConvertCustomConfig().set_observed_to_quantized_mapping(Observed, Quantized)


def shape(module: Any) -> list[Any]:
    """The graph without the names of its nodes."""
    number = {node: f"%{position}" for position, node in enumerate(module.graph.nodes)}
    return [
        (n.op, n.target, str(fx.map_arg((n.args, n.kwargs), number.__getitem__)))
        for n in module.graph.nodes
    ]


def test_static_is_torchs(both: Any) -> None:
    model, x = Model().eval(), torch.randn(8, 4)
    results = []
    for side in (both.ours, both.theirs):
        prepared = side.prepare(model, x, prepare_custom(side.config))
        both.feed(prepared, x)
        reference = side.reference(prepared, convert_custom(side.config))
        quantized = side.convert(prepared, convert_custom(side.config))
        results.append((prepared, reference, quantized))
    (ours, reference, quantized), (theirs, torch_reference, torch_quantized) = results
    assert shape(ours) == shape(theirs)
    assert shape(reference) == shape(torch_reference)
    assert torch.equal(reference(x), torch_reference(x))
    step = 1.01 * ours.activation_post_process_3.calculate_qparams()[0]
    assert (quantized(x) - torch_quantized(x)).abs().max() <= step
    assert [use.nodes for use in quantized.kernels] == [("first",), ("last",)]
    assert quantized.left_in_float == ()


def test_parts_inside_have_the_qconfig_of_their_own_rule(both: Any) -> None:
    model, x = Model().eval(), torch.randn(8, 4)
    for side in (both.ours, both.theirs):
        mapping = side.mapping()
        prepared = side.prepare(model, x, prepare_custom(side.config), mapping)
        assert "MinMaxObserver" in repr(prepared.mine.linear.qconfig.activation)
        mapping.set_module_name("mine.linear", None)
        prepared = side.prepare(model, x, prepare_custom(side.config), mapping)
        assert prepared.mine.linear.qconfig is None
        assert prepared.mine.qconfig is not None


def test_the_model_and_the_prepared_one_are_not_changed(both: Any, unchanged: Any) -> None:
    model, x = Model().eval(), torch.randn(8, 4)
    with unchanged(model):
        prepared = both.feed(both.ours.prepare(model, x, prepare_custom(bq)), x)
        first = bq.convert_fx(prepared, convert_custom(bq))
    second = bq.convert_fx(prepared, convert_custom(bq))
    assert torch.equal(first(x), second(x))
    assert type(prepared.mine) is Observed
    assert not hasattr(prepared.mine, "activation_post_process")
    twin = pickle.loads(pickle.dumps(copy.deepcopy(prepared)))
    assert torch.equal(bq.convert_fx(twin, convert_custom(bq))(x), first(x))


def test_called_twice(both: Any) -> None:
    """One observed module, and a quantized one for each output's qparams."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mine = Mine()

        def forward(self, x):
            return self.mine(self.mine(x))

    model, x = Twice().eval(), torch.randn(8, 4)
    prepared = both.feed(both.ours.prepare(model, x, prepare_custom(bq)), x)
    reference = bq.convert_to_reference_fx(prepared, convert_custom(bq))
    targets = [n.target for n in reference.graph.nodes if n.op == "call_module"]
    assert targets == ["mine", "mine_1"]
    assert reference.mine.linear.scale != reference.mine_1.linear.scale
    assert (bq.convert_fx(prepared, convert_custom(bq))(x) - model(x)).abs().max() < 0.1


class Plain(nn.Module):
    """A quantized class with plain tensors on both sides."""

    float_interface = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x):
        assert not x.is_quantized
        return nn.functional.linear(x, self.weight, self.bias)

    @classmethod
    def from_observed(cls, observed):
        assert observed.activation_post_process is not None
        return cls(observed.linear.weight.detach(), observed.linear.bias.detach())


def test_float_interface(both: Any, tmp_path: Any) -> None:
    model, x = Model().eval(), torch.randn(8, 4)
    prepared = both.feed(both.ours.prepare(model, x, prepare_custom(bq)), x)
    custom = bq.ConvertCustomConfig().set_observed_to_quantized_mapping(Observed, Plain)
    quantized = bq.convert_fx(prepared, custom)
    assert len(quantized.kernels) == 2
    assert quantized.left_in_float == ()
    assert (quantized(x) - model(x)).abs().max() < 0.1
    with pytest.raises(bq.ArtifactError, match="cannot be stored"):
        bq.save(quantized, tmp_path / "model.bq")


@pytest.mark.parametrize("kind", [bq.qconfig.QuantType.DYNAMIC, bq.qconfig.QuantType.WEIGHT_ONLY])
def test_dynamic_and_weight_only(both: Any, kind: bq.qconfig.QuantType) -> None:
    """Nothing is observed around them. In PyTorch, float modules can be static custom modules only."""
    asked = {
        bq.qconfig.QuantType.DYNAMIC: bq.default_dynamic_qconfig,
        bq.qconfig.QuantType.WEIGHT_ONLY: bq.qconfig.default_weight_only_qconfig,
    }[kind]
    model, x = nn.Sequential(Mine(), nn.ReLU()).eval(), torch.randn(8, 4)
    mapping = bq.QConfigMapping().set_object_type(Mine, asked)
    custom = bq.PrepareCustomConfig().set_float_to_observed_mapping(Mine, Observed, kind)
    prepared = both.ours.prepare(model, x, custom, mapping)
    assert [n.target for n in prepared.graph.nodes if n.op == "call_module"] == ["0", "1"]
    convert = bq.ConvertCustomConfig()
    convert.set_observed_to_quantized_mapping(Observed, Dynamic, kind)
    quantized = bq.convert_fx(prepared, convert)
    expected = Dynamic.from_observed(copy.deepcopy(prepared.get_submodule("0")))
    assert torch.equal(quantized(x), expected(x).relu())


def test_observed_from_the_start(both: Any) -> None:
    """PyTorch's way to dynamic custom modules: the observed class stands in the model, left whole."""
    linear = nn.Linear(4, 4)
    x, results = torch.randn(8, 4), []
    for side in (both.ours, both.theirs):
        model = nn.Sequential(Observed(linear), nn.ReLU()).eval()
        if side.is_torch:
            import torch.ao.quantization as tq

            mapping = tq.QConfigMapping().set_object_type(Observed, tq.default_dynamic_qconfig)
            kind = tq.quant_type.QuantType.DYNAMIC
        else:
            mapping = bq.QConfigMapping().set_object_type(Observed, bq.default_dynamic_qconfig)
            kind = bq.qconfig.QuantType.DYNAMIC
        custom = side.config.PrepareCustomConfig().set_non_traceable_module_classes([Observed])
        prepared = side.prepare(model, x, custom, mapping)
        convert = side.config.ConvertCustomConfig()
        convert.set_observed_to_quantized_mapping(Observed, Dynamic, kind)
        results.append(side.convert(prepared, convert))
    ours, theirs = results
    assert type(ours.graph_module.get_submodule("0")) is Dynamic
    assert torch.equal(ours(x), theirs(x))
    assert ours.plan.decisions["_0"].outcome is Outcome.QUANTIZED
    assert ours.plan.matches[-1].kind is MatchKind.CUSTOM_MODULE


def test_a_class_of_another_kind_is_an_operator(both: Any) -> None:
    """An LSTM that is mapped for static quantization is dynamically quantized by its pattern."""
    from backquant.nn import quantizable

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3)
            self.mine = Mine()

        def forward(self, x):
            return self.lstm(self.mine(x))[0]

    custom = prepare_custom(bq).set_float_to_observed_mapping(nn.LSTM, quantizable.LSTM)
    mapping = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig)
    prepared = both.ours.prepare(Net().eval(), torch.randn(5, 2, 4), custom, mapping)
    plan = prepared_state(prepared).plan
    assert plan.decisions["lstm"].quantized
    assert plan.matches[plan.decisions["lstm"].match].kind is MatchKind.PATTERN
    reason = plan.decisions["mine"].reasons[0]
    assert (reason.rule, reason.asked) == ("custom-module", "Mine, dynamic quantization")
    assert reason.admitted == "Mine as custom module: static"


def test_left_out_by_the_mapping(both: Any) -> None:
    model, x = Model().eval(), torch.randn(8, 4)
    mapping = both.ours.mapping().set_object_type(Mine, None)
    prepared = both.ours.prepare(model, x, prepare_custom(bq), mapping)
    assert type(prepared.mine) is Mine
    assert prepared_state(prepared).plan.decisions["mine"].reasons[0].rule == "qconfig-none"
    assert len(bq.convert_fx(both.feed(prepared, x)).kernels) == 2


class TestRefusals:
    def prepared(self, both: Any, observed: type = Observed) -> fx.GraphModule:
        custom = bq.PrepareCustomConfig().set_float_to_observed_mapping(Mine, observed)
        x = torch.randn(8, 4)
        return both.feed(both.ours.prepare(Model().eval(), x, custom), x)

    def test_classes_without_the_method(self, both: Any, snapshot: Any) -> None:
        """As in PyTorch they are refused where they are used: the error names entry and node."""
        custom = bq.PrepareCustomConfig().set_float_to_observed_mapping(Mine, Quantized)
        with pytest.raises(ConfigError) as caught:
            both.ours.prepare(Model().eval(), torch.randn(8, 4), custom)
        snapshot("custom-no-from-float", caught.value)
        convert = bq.ConvertCustomConfig().set_observed_to_quantized_mapping(Observed, Mine)
        with pytest.raises(ConfigError) as caught:
            bq.convert_fx(self.prepared(both), convert)
        snapshot("custom-no-from-observed", caught.value)

    def test_from_float_fails(self, both: Any, snapshot: Any) -> None:
        class Failing(Observed):
            @classmethod
            def from_float(cls, module):
                raise KeyError("weight")

        with pytest.raises(ConfigError) as caught:
            self.prepared(both, Failing)
        snapshot("custom-from-float-raises", caught.value)

    def test_from_float_returns_no_module(self, both: Any, snapshot: Any) -> None:
        class Empty(Observed):
            @classmethod
            def from_float(cls, module):
                return None

        with pytest.raises(ConfigError) as caught:
            self.prepared(both, Empty)
        snapshot("custom-from-float-none", caught.value)

    def test_from_observed_fails(self, both: Any, snapshot: Any) -> None:
        class Failing(Quantized):
            @classmethod
            def from_observed(cls, observed):
                raise RuntimeError("no kernel")

        custom = bq.ConvertCustomConfig().set_observed_to_quantized_mapping(Observed, Failing)
        with pytest.raises(ConfigError) as caught:
            bq.convert_fx(self.prepared(both), custom)
        snapshot("custom-from-observed-raises", caught.value)

    def test_observed_and_mapped_to_nothing(self, both: Any, snapshot: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            bq.convert_fx(self.prepared(both))
        snapshot("custom-unmapped", caught.value)

    def test_no_way_back_to_float(self, both: Any, snapshot: Any) -> None:
        mapping = both.ours.mapping().set_module_name("mine", None)
        with pytest.raises(ConfigError) as caught:
            bq.convert_fx(self.prepared(both), convert_custom(bq), qconfig_mapping=mapping)
        snapshot("custom-no-way-back", caught.value)

    def test_a_way_back_to_float(self, both: Any) -> None:
        class Reversible(Observed):
            def to_float(self):
                return Mine(self.linear)

        mapping = both.ours.mapping().set_module_name("mine", None)
        quantized = bq.convert_fx(self.prepared(both, Reversible), qconfig_mapping=mapping)
        assert type(quantized.graph_module.mine) is Mine
        assert len(quantized.kernels) == 2

    def test_quantized_tensors_need_observers(self, both: Any, snapshot: Any) -> None:
        x = torch.randn(8, 4)
        custom = bq.PrepareCustomConfig().set_non_traceable_module_classes([Observed])
        model = nn.Sequential(Observed(nn.Linear(4, 4))).eval()
        prepared = both.ours.prepare(model, x, custom)
        with pytest.raises(ConfigError) as caught:
            bq.convert_fx(prepared, convert_custom(bq))
        snapshot("custom-unobserved", caught.value)


BY_HAND = {
    **dict.fromkeys(
        ["class ", "set it to None", "PrepareCustomConfig()"],
        lambda _, n: bq.convert_fx(TestRefusals().prepared(n["both"]), convert_custom(bq)),
    ),
}
