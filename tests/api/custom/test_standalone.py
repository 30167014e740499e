"""Standalone modules, against PyTorch's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import fx, nn

import backquant as bq
from backquant.errors import ConfigError, InputError
from backquant.match import MatchKind
from backquant.prepare import PreparedModule, prepared_state


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.conv(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.inner = Inner()
        self.post = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.post(self.inner(self.conv(x)))


def standalone(config: Any, indexes: list[int], by: str = "name", **entry: Any) -> Any:
    custom = config.PrepareCustomConfig()
    inner = config.PrepareCustomConfig()
    inner.set_input_quantized_indexes(indexes).set_output_quantized_indexes(indexes)
    entry = {"qconfig_mapping": None, "prepare_custom_config": inner, **entry}
    arguments = {"example_inputs": (torch.randn(1, 3, 4, 4),), "backend_config": None, **entry}
    if by == "name":
        return custom.set_standalone_module_name("inner", **arguments)
    return custom.set_standalone_module_class(Inner, **arguments)


def image() -> torch.Tensor:
    return torch.randn(2, 3, 4, 4)


def code(module: Any) -> list[Any]:
    """The graph without the names of its nodes: PyTorch numbers dequantize nodes in another order."""
    number = {node: f"%{position}" for position, node in enumerate(module.graph.nodes)}
    return [
        (n.op, n.target, str(fx.map_arg((n.args, n.kwargs), number.__getitem__)))
        for n in module.graph.nodes
    ]


@pytest.mark.parametrize("by", ["name", "class"])
def test_quantized_interface_is_torchs(both: Any, by: str) -> None:
    model, x = Model().eval(), image()
    sides = {}
    for name, side in (("ours", both.ours), ("theirs", both.theirs)):
        prepared = side.prepare(model, x, standalone(side.config, [0], by))
        both.feed(prepared, x)
        sides[name] = (prepared, side.reference(prepared), side.convert(prepared))
    (ours, reference, quantized), (theirs, torch_reference, torch_quantized) = sides.values()
    assert code(ours) == code(theirs)
    assert code(ours.inner) == code(theirs.inner)
    assert code(reference) == code(torch_reference)
    assert code(reference.inner) == code(torch_reference.inner)
    assert torch.equal(reference(x), torch_reference(x))
    # what integer kernels give differs from theirs by a rounding at most
    last = dict(prepared_state(ours).sites.groups())
    scale, _ = ours.get_submodule(list(last)[-1]).calculate_qparams()
    assert (quantized(x) - torch_quantized(x)).abs().max() <= 1.01 * scale
    assert [use.nodes for use in quantized.kernels] == [("conv",), ("post",), ("inner.conv",)]
    assert quantized.left_in_float == ()


def test_float_interface(both: Any) -> None:
    """*Different:* PyTorch takes the float output for quantized, and so loses the last convolution."""
    model, x = Model().eval(), image()
    ours = both.ours.prepare(model, x, standalone(bq, []))
    theirs = both.theirs.prepare(model, x, standalone(both.theirs.config, []))
    assert code(ours.inner) == code(theirs.inner)
    observers = [n.target for n in ours.graph.nodes if "post_process" in str(n.target)]
    assert len(observers) == 4
    assert len([n for n in theirs.graph.nodes if "post_process" in str(n.target)]) == 3
    both.feed(ours, x)
    both.feed(theirs, x)
    assert type(both.theirs.convert(theirs).post).__name__ == "Conv2d"  # the reference module
    quantized = both.ours.convert(ours)
    assert len(quantized.kernels) == 3
    step = ours.get_submodule(observers[-1]).calculate_qparams()[0]
    assert (quantized(x) - model(x)).abs().max() < 4 * step


def test_own_configs(both: Any) -> None:
    """A mapping and a backend of its own: what the parent does not quantize, and another engine."""
    model, x = Model().eval(), image()
    own = both.ours.mapping()
    custom = standalone(
        bq,
        [],
        qconfig_mapping=own,
        backend_config=bq.backend_config.get_fbgemm_backend_config(),
    )
    prepared = both.ours.prepare(model, x, custom, bq.QConfigMapping())
    state = prepared_state(prepared)
    assert [decision.outcome.value for decision in state.plan.decisions.values()] == [
        "float",
        "quantized",
        "float",
    ]
    assert prepared_state(prepared.inner).backend_config.name == "fbgemm"
    both.feed(prepared, x)
    quantized = both.ours.convert(prepared)
    assert {use.engine for use in quantized.kernels} == {"fbgemm"}
    assert [use.nodes for use in quantized.kernels] == [("inner.conv",)]
    assert (quantized(x) - model(x)).abs().max() < 0.05


def test_a_backend_without_engine_around_one_with(both: Any) -> None:
    model, x = Model().eval(), image()
    custom = standalone(bq, [0], backend_config=bq.backend_config.get_x86_backend_config())
    reference_only = bq.backend_config.get_x86_backend_config().set_engine(None)
    prepared = bq.prepare_fx(model, both.ours.mapping(), x, custom, backend_config=reference_only)
    both.feed(prepared, x)
    quantized = bq.convert_fx(prepared)
    assert quantized.engine is None
    assert [use.nodes for use in quantized.kernels] == [("inner.conv",)]
    reference = bq.convert_to_reference_fx(prepared, dialect="decomposed")
    assert (quantized(x) - reference(x)).abs().max() < 0.05


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.inner = Inner()

    def forward(self, x):
        return self.inner(self.conv(self.inner(x)))


def test_called_twice(both: Any) -> None:
    """Once per set of qparams that it is called with; weights and inner observers are shared."""
    model, x = Twice().eval(), image()
    prepared = both.ours.prepare(model, x, standalone(bq, [0]))
    assert isinstance(prepared.inner, PreparedModule)
    both.feed(prepared, x)
    reference = bq.convert_to_reference_fx(prepared, dialect="decomposed")
    calls = [n.target for n in reference.graph.nodes if str(n.target).startswith("inner")]
    assert calls == ["inner", "inner_1"]
    assert "quantize_per_tensor" in reference.inner_1.code
    quantized = bq.convert_fx(prepared)
    assert len(quantized.kernels) == 3
    tensors = bq.convert_to_reference_fx(prepared)
    assert [n.target for n in tensors.graph.nodes if n.op == "call_module"] == [
        "inner",
        "conv",
        "inner",
    ]
    assert torch.equal(tensors(x), reference(x))


def test_two_rules_give_two_modules(both: Any) -> None:
    model, x = Twice().eval(), image()
    mapping = both.ours.mapping()
    mapping.set_module_name_object_type_order("", Inner, 1, None)
    prepared = both.ours.prepare(model, x, standalone(bq, []), mapping)
    plan = prepared_state(prepared).plan
    kinds = {m.anchor: m.kind for m in plan.matches if m.kind is MatchKind.STANDALONE}
    assert list(kinds) == ["inner", "inner_1"]
    assert plan.decisions["inner"].quantized
    assert plan.decisions["inner_1"].reasons[0].rule == "qconfig-none"
    assert [n.target for n in prepared.graph.nodes if str(n.target).startswith("inner")] == [
        "inner",
        "inner",
    ]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Model()
        self.last = nn.Conv2d(2, 2, 1)

    def forward(self, x):
        return self.last(self.outer(x))


def test_nested(both: Any) -> None:
    """A standalone module in a standalone module: not in PyTorch, which applies the top level's only."""
    model, x = Nested().eval(), image()
    inner = standalone(bq, [0]).set_output_quantized_indexes([0])
    custom = bq.PrepareCustomConfig().set_standalone_module_name("outer", None, (), inner)
    prepared = both.ours.prepare(model, x, custom)
    both.feed(prepared, x)
    assert isinstance(prepared.outer.inner, PreparedModule)
    quantized = bq.convert_fx(prepared)
    nodes = [".".join(use.nodes) for use in quantized.kernels]
    assert nodes == ["last", "outer.conv", "outer.post", "outer.inner.conv"]
    reference = bq.convert_to_reference_fx(prepared)
    assert (quantized(x) - reference(x)).abs().max() < 0.02
    assert (quantized(x) - model(x)).abs().max() < 0.05


def test_keyword_argument(both: Any) -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x=self.conv(x))

    model, x = Keyword().eval(), image()
    prepared = both.feed(both.ours.prepare(model, x, standalone(bq, [0])), x)
    assert len(bq.convert_fx(prepared).kernels) == 2


def test_training(both: Any) -> None:
    model, x = Model().train(), image()
    mapping = bq.get_default_qat_qconfig_mapping("x86")
    backend = bq.backend_config.get_x86_backend_config()
    prepared = bq.prepare_qat_fx(model, mapping, x, standalone(bq, [0]), backend)
    assert type(prepared.inner.conv).__name__ == "ConvReLU2d"
    assert hasattr(prepared.inner.conv, "weight_fake_quant")
    prepared(x).sum().backward()
    assert prepared.inner.conv.weight.grad is not None
    assert model.inner.conv.weight.grad is None
    prepared.eval()
    quantized = bq.convert_fx(prepared)
    assert len(quantized.kernels) == 3
    scale = 0.02
    assert (quantized(x) - prepared(x)).abs().max() < 3 * scale


def test_the_model_is_not_changed(both: Any, unchanged: Any) -> None:
    model, x = Model().eval(), image()
    with unchanged(model):
        prepared = both.feed(both.ours.prepare(model, x, standalone(bq, [0])), x)
        bq.convert_fx(prepared)
    assert type(model.inner) is Inner


def test_copies_and_pickles(both: Any) -> None:
    model, x = Model().eval(), image()
    prepared = both.feed(both.ours.prepare(model, x, standalone(bq, [0])), x)
    expected = bq.convert_fx(prepared)(x)
    for twin in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert isinstance(twin.inner, PreparedModule)
        assert torch.equal(bq.convert_fx(twin)(x), expected)
    reference = bq.convert_to_reference_fx(prepared)
    assert torch.equal(copy.deepcopy(reference)(x), reference(x))


def test_prepared_is_not_changed_by_conversion(both: Any) -> None:
    model, x = Model().eval(), image()
    prepared = both.feed(both.ours.prepare(model, x, standalone(bq, [0])), x)
    before = prepared(x)
    first = bq.convert_fx(prepared)(x)
    assert torch.equal(prepared(x), before)
    assert torch.equal(bq.convert_fx(prepared)(x), first)


def test_one_call_and_artifact(both: Any, tmp_path: Any) -> None:
    model, x = Model().eval(), image()
    custom = standalone(bq, [0])
    quantized = bq.quantize(model, calibration=[x], prepare_custom_config=custom)
    assert len(quantized.kernels) == 3
    bq.save(quantized, tmp_path / "model.bq")
    loaded = bq.load(tmp_path / "model.bq")
    assert torch.equal(loaded(x), quantized(x))
    assert loaded.audit().integer_kernels == quantized.audit().integer_kernels


class TestRefusals:
    def test_no_such_module(self, both: Any, snapshot: Any) -> None:
        custom = bq.PrepareCustomConfig().set_standalone_module_name("iner", None, ())
        with pytest.raises(ConfigError) as caught:
            both.ours.prepare(Model().eval(), image(), custom)
        snapshot("standalone-misspelt", caught.value)

    def test_named_twice(self, both: Any, snapshot: Any) -> None:
        custom = standalone(bq, []).set_non_traceable_module_names(["inner"])
        with pytest.raises(ConfigError) as caught:
            both.ours.prepare(Model().eval(), image(), custom)
        snapshot("standalone-named-twice", caught.value)

    def test_nothing_quantizes_its_input(self, both: Any, snapshot: Any) -> None:
        custom = standalone(bq, [0], qconfig_mapping=both.ours.mapping())
        with pytest.raises(ConfigError) as caught:
            both.ours.prepare(Model().eval(), image(), custom, bq.QConfigMapping())
        snapshot("standalone-unasked-input", caught.value)

    def test_input_index(self, both: Any, snapshot: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            both.ours.prepare(Model().eval(), image(), standalone(bq, [3]))
        snapshot("standalone-input-index", caught.value)

    def test_several_outputs(self, both: Any, snapshot: Any) -> None:
        class Pair(nn.Module):
            def forward(self, x):
                return x + 1, x

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Pair()

            def forward(self, x):
                return self.inner(x)[0]

        with pytest.raises(ConfigError) as caught:
            both.ours.prepare(Net().eval(), image(), standalone(bq, [0]))
        snapshot("standalone-outputs", caught.value)

    def test_examples_that_do_not_fit(self, both: Any) -> None:
        custom = bq.PrepareCustomConfig()
        custom.set_standalone_module_name("inner", None, (torch.randn(2, 5),))
        with pytest.raises(InputError, match="do not fit") as caught:
            both.ours.prepare(Model().eval(), image(), custom)
        assert caught.value.where.startswith("standalone module 'inner': ")

    def test_errors_inside_name_the_module(self, both: Any) -> None:
        inner = bq.PrepareCustomConfig().set_preserved_attributes(["nothing"])
        custom = standalone(bq, [], prepare_custom_config=inner)
        with pytest.raises(ConfigError, match="no attribute 'nothing'") as caught:
            both.ours.prepare(Model().eval(), image(), custom)
        assert caught.value.where.startswith("standalone module 'inner': ")

    def test_uncalled_is_noted(self, both: Any) -> None:
        model = Model().eval()
        model.spare = Inner()
        custom = bq.PrepareCustomConfig().set_standalone_module_name("spare", None, ())
        prepared = both.ours.prepare(model, image(), custom)
        assert prepared_state(prepared).plan.notes[-1] == (
            'standalone module "spare" is called nowhere in the traced model'
        )


def _prepared(names: dict[str, Any], custom: Any) -> None:
    names["both"].ours.prepare(Model().eval(), image(), custom)


BY_HAND = {
    "set_input_quantized_indexes([0])": lambda _, n: _prepared(n, standalone(bq, [0])),
    "leave it out of": lambda _, n: [
        _prepared(n, standalone(bq, [])),
        _prepared(n, bq.PrepareCustomConfig().set_non_traceable_module_names(["inner"])),
    ],
    "return one tensor and set [0]": lambda _, n: _prepared(n, standalone(bq, [0])),
    "parent's mapping": lambda _, n: [
        _prepared(n, standalone(bq, [0], qconfig_mapping=n["both"].ours.mapping())),
        _prepared(n, standalone(bq, [], qconfig_mapping=n["both"].ours.mapping())),
    ],
}
