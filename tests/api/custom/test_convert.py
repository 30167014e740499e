"""Conversions that are asked for something else than their preparation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import backquant as bq
from backquant.backend_config import BackendConfig
from backquant.errors import ConfigError, UsageError
from backquant.match import Outcome


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = F.relu(self.bn(self.conv1(x)))
        x = self.conv2(x) + x
        x = F.relu(self.fc(x.mean([2, 3])))
        return torch.sigmoid(self.head(x))


def image() -> torch.Tensor:
    return torch.randn(2, 3, 6, 6)


def shape(module: Any) -> list[Any]:
    number = {node: f"%{position}" for position, node in enumerate(module.graph.nodes)}
    return [
        (n.op, n.target, str(fx.map_arg((n.args, n.kwargs), number.__getitem__)))
        for n in module.graph.nodes
    ]


SKIPS = {
    "by name": lambda mapping: mapping.set_module_name("fc", None),
    "by type": lambda mapping: mapping.set_object_type(torch.sigmoid, None),
    "a sum": lambda mapping: mapping.set_object_type(torch.add, None),
    "by regex": lambda mapping: mapping.set_module_name_regex("conv.*", None),
    "several": lambda mapping: mapping.set_module_name("conv2", None).set_module_name("head", None),
}


class TestMapping:
    @pytest.mark.parametrize("skip", list(SKIPS))
    def test_skips_are_torchs(self, both: Any, skip: str) -> None:
        model, x, results = Model().eval(), image(), []
        for side in (both.ours, both.theirs):
            prepared = both.feed(side.prepare(model, x), x)
            mapping = SKIPS[skip](side.mapping())
            results.append(side.reference(prepared, qconfig_mapping=mapping))
        ours, theirs = results
        assert shape(ours) == shape(theirs)
        assert torch.equal(ours(x), theirs(x))

    def test_order_rule_is_torchs(self, both: Any) -> None:
        model, x, results = Model().eval(), image(), []
        for side in (both.ours, both.theirs):
            prepared = both.feed(side.prepare(model, x), x)
            mapping = side.mapping()
            mapping.set_module_name_object_type_order("", F.relu, 1, None)
            mapping.set_module_name_object_type_order("", nn.Linear, 1, None)
            results.append(side.reference(prepared, qconfig_mapping=mapping))
        ours, theirs = results
        assert torch.equal(ours(x), theirs(x))
        assert type(ours.head) is type(theirs.head) is nn.Linear

    def test_the_plan_says_why(self, both: Any) -> None:
        model, x = Model().eval(), image()
        prepared = both.feed(both.ours.prepare(model, x), x)
        before = [use.nodes for use in bq.convert_fx(prepared).kernels]
        mapping = both.ours.mapping().set_module_name("fc", None)
        quantized = bq.convert_fx(prepared, qconfig_mapping=mapping)
        decision = quantized.plan.decisions["fc"]
        assert decision.outcome is Outcome.FLOAT
        assert decision.reasons[0].asked == 'module_name "fc" is None: skip'
        assert [use.nodes for use in quantized.kernels] == [n for n in before if "fc" not in n]
        assert [use.nodes for use in bq.convert_fx(prepared).kernels] == before

    def test_none_for_a_fused_class_counts(self, both: Any) -> None:
        """In PyTorch, ``None`` for the class of a fused module's first part does nothing."""
        model, x = Model().eval(), image()
        for side in (both.ours, both.theirs):
            prepared = both.feed(side.prepare(model, x), x)
            mapping = side.mapping().set_object_type(nn.Linear, None)
            reference = side.reference(prepared, qconfig_mapping=mapping)
            assert "Reference" not in repr(reference.head)
            assert ("Reference" in repr(reference.fc)) is side.is_torch

    def test_none_for_a_fused_part_counts(self, both: Any) -> None:
        """In PyTorch, a rule for a module that was fused away does nothing."""
        model, x = Model().eval(), image()
        for side in (both.ours, both.theirs):
            prepared = both.feed(side.prepare(model, x), x)
            mapping = side.mapping().set_module_name("bn", None)
            reference = side.reference(prepared, qconfig_mapping=mapping)
            name = type(reference.conv1[0]).__name__
            assert name == "Conv2d"
            assert ("Reference" in repr(reference.conv1[0])) is side.is_torch

    def test_the_same_mapping_changes_nothing(self, both: Any) -> None:
        model, x = Model().eval(), image()
        prepared = both.feed(both.ours.prepare(model, x), x)
        plain, again = (
            bq.convert_to_reference_fx(prepared, qconfig_mapping=mapping)
            for mapping in (None, both.ours.mapping())
        )
        assert plain.code == again.code
        assert torch.equal(plain(x), again(x))

    def test_trained_models(self, both: Any) -> None:
        model, x = Model().train(), image()
        backend = bq.backend_config.get_x86_backend_config()
        mapping = bq.get_default_qat_qconfig_mapping("x86")
        prepared = bq.prepare_qat_fx(model, mapping, x, backend_config=backend)
        prepared(x).sum().backward()
        prepared.eval()
        quantized = bq.convert_fx(prepared, qconfig_mapping=mapping.set_module_name("conv2", None))
        assert type(quantized.graph_module.conv2) is nn.Conv2d
        float_nodes = [n for n, d in quantized.plan.decisions.items() if d.outcome.value == "float"]
        assert float_nodes == ["conv2"]
        assert (quantized(x) - prepared(x)).abs().max() < 0.05

    def test_standalone_modules(self, both: Any) -> None:
        """Left out with their rule; PyTorch converts them all the same."""

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Model()
                self.last = nn.Linear(2, 2)

            def forward(self, x):
                return self.last(self.inner(x))

        model, x = Outer().eval(), image()
        inner = bq.PrepareCustomConfig().set_input_quantized_indexes([0])
        custom = bq.PrepareCustomConfig().set_standalone_module_name("inner", None, (), inner)
        # The module has its parent's rule as its global one, and that does not fit its sigmoid.
        with pytest.warns(UserWarning, match="in standalone module 'inner': 1 operator"):
            prepared = both.ours.prepare(model, x, custom)
        both.feed(prepared, x)
        mapping = both.ours.mapping().set_module_name("inner", None)
        quantized = bq.convert_fx(prepared, qconfig_mapping=mapping)
        assert [use.nodes for use in quantized.kernels] == [("last",)]
        assert torch.allclose(quantized.graph_module.inner(x), model.inner(x), atol=1e-6)

    @pytest.mark.parametrize(
        "change",
        [
            lambda mapping, other: mapping.set_global(other),
            lambda mapping, other: mapping.set_global(None),
            lambda mapping, other: mapping.set_object_type(torch.sigmoid, other),
            lambda mapping, other: mapping.set_module_name("fc", other),
            lambda mapping, other: mapping.object_type_qconfigs.popitem() and mapping,
        ],
        ids=["global", "no-global", "type", "name", "missing"],
    )
    def test_other_mappings_are_refused(
        self, both: Any, change: Any, snapshot: Any, request: pytest.FixtureRequest
    ) -> None:
        model, x = Model().eval(), image()
        for side in (both.theirs, both.ours):
            prepared = both.feed(side.prepare(model, x), x)
            mapping = side.mapping()
            other = type(mapping.global_qconfig)(
                side.mapping().global_qconfig.activation, side.mapping().global_qconfig.activation
            )
            change(mapping, other)
            with pytest.raises(AssertionError if side.is_torch else ConfigError) as caught:
                side.reference(prepared, qconfig_mapping=mapping)
        snapshot(f"convert-mapping-{request.node.callspec.id}", caught.value)


class TestBackend:
    def test_what_the_other_does_not_admit_stays_float(self, both: Any) -> None:
        model, x = Model().eval(), image()
        prepared = both.feed(both.ours.prepare(model, x), x)
        entries = [
            e
            for e in bq.backend_config.get_x86_backend_config().configs
            if e.pattern is not nn.Linear
        ]
        fewer = BackendConfig("fewer").set_backend_pattern_configs(entries).set_engine("x86")
        quantized = bq.convert_fx(prepared, backend_config=fewer)
        assert quantized.backend_config.name == "fewer"
        decision = quantized.plan.decisions["head"]
        assert decision.outcome is Outcome.FLOAT
        assert decision.reasons[0].rule == "no-entry"
        assert type(quantized.graph_module.head) is nn.Linear
        assert (quantized(x) - model(x)).abs().max() < 0.05

    def test_another_engine(self, both: Any) -> None:
        model, x = Model().eval(), image()
        prepared = both.feed(both.ours.prepare(model, x), x)
        fbgemm = bq.convert_fx(
            prepared, backend_config=bq.backend_config.get_fbgemm_backend_config()
        )
        assert {use.engine for use in fbgemm.kernels} == {"fbgemm"}
        assert (fbgemm(x) - bq.convert_fx(prepared)(x)).abs().max() < 0.02

    def test_constraints_of_the_other(self, both: Any) -> None:
        """qnnpack's scales are bounded from below; the observers have no such bound."""
        model, x = Model().eval(), image()
        prepared = both.feed(both.ours.prepare(model, x), x)
        qnnpack = bq.backend_config.get_qnnpack_backend_config()
        reference = bq.convert_to_reference_fx(prepared, backend_config=qnnpack)
        plan = reference.meta["backquant"].plan
        assert plan.backend == "qnnpack"
        ruled = bq.prepare_fx(model, both.ours.mapping(), x, backend_config=qnnpack)
        expected = ruled.meta["backquant"].plan
        assert [d.outcome for d in plan.decisions.values()] == [
            d.outcome for d in expected.decisions.values()
        ]

    def test_nothing_becomes_quantized(self, both: Any) -> None:
        """What the first backend left in float was not observed."""
        model, x = Model().eval(), image()
        entries = [
            e
            for e in bq.backend_config.get_x86_backend_config().configs
            if e.pattern is not nn.Linear
        ]
        fewer = BackendConfig("fewer").set_backend_pattern_configs(entries)
        prepared = bq.prepare_fx(model, both.ours.mapping(), x, backend_config=fewer)
        both.feed(prepared, x)
        quantized = bq.convert_fx(
            prepared, backend_config=bq.backend_config.get_x86_backend_config()
        )
        decision = quantized.plan.decisions["head"]
        assert decision.outcome is Outcome.FLOAT
        assert [reason.rule for reason in decision.reasons] == ["no-entry"]

    def test_dict_form(self, both: Any) -> None:
        model, x = Model().eval(), image()
        prepared = both.feed(both.ours.prepare(model, x), x)
        dictionary = bq.backend_config.get_fbgemm_backend_config().to_dict()
        made = bq.convert_to_reference_fx(prepared, backend_config=dictionary)
        assert made.meta["backquant"].backend_config.name == "fbgemm"


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 4))
        self.b = nn.Parameter(torch.randn(5))
        self.sub = nn.Sequential(nn.Linear(5, 3), nn.ReLU())
        self.v = nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        return F.linear(self.sub(F.linear(x, self.w, self.b)), self.v)


class TestOriginalWeights:
    def test_functional_weights_are_torchs(self, both: Any) -> None:
        model, x = Functional().eval(), torch.randn(4, 4)
        ours = both.feed(both.ours.prepare(model, x), x)
        theirs = both.feed(both.theirs.prepare(model, x), x)
        found = bq.convert_fx(ours, keep_original_weights=True).original_weights_lookup
        expected = both.theirs.convert(theirs, keep_original_weights=True).original_weights_lookup
        assert set(expected) == {key for key in found if "packed_weight" in key}
        for key, (weight, *_) in expected.items():
            assert torch.equal(found[key][0], weight)
        assert torch.equal(found["_packed_weight_0"][1], model.b)
        assert found["_packed_weight_1"][1] is None

    def test_weights_of_modules(self, both: Any) -> None:
        model, x = Functional().eval(), torch.randn(4, 4)
        prepared = both.feed(both.ours.prepare(model, x), x)
        found = bq.convert_fx(prepared, keep_original_weights=True).original_weights_lookup
        weight, bias = found["sub.0"]
        assert torch.equal(weight, model.sub[0].weight) and weight is not model.sub[0].weight
        assert torch.equal(bias, model.sub[0].bias)

    def test_only_of_what_is_quantized_and_only_when_asked(self, both: Any) -> None:
        model, x = Functional().eval(), torch.randn(4, 4)
        prepared = both.feed(both.ours.prepare(model, x), x)
        mapping = both.ours.mapping().set_module_name("sub", None)
        quantized = bq.convert_fx(prepared, qconfig_mapping=mapping, keep_original_weights=True)
        assert list(quantized.original_weights_lookup) == ["_packed_weight_0", "_packed_weight_1"]
        assert not hasattr(bq.convert_fx(prepared), "original_weights_lookup")

    def test_standalone_modules(self, both: Any) -> None:
        model, x = nn.Sequential(Functional()).eval(), torch.randn(4, 4)
        custom = bq.PrepareCustomConfig().set_standalone_module_name("0", None, ())
        prepared = both.feed(both.ours.prepare(model, x, custom), x)
        found = bq.convert_fx(prepared, keep_original_weights=True).original_weights_lookup
        assert set(found) == {"0._packed_weight_0", "0._packed_weight_1", "0.sub.0"}


class TestAttributes:
    def test_preserved_through_every_step(self, both: Any, tmp_path: Any) -> None:
        model, x = Model().eval(), image()
        model.tag = {"version": 3}
        for side in (both.theirs, both.ours):
            custom = side.config.PrepareCustomConfig().set_preserved_attributes(["tag"])
            prepared = both.feed(side.prepare(model, x, custom), x)
            assert prepared.tag == {"version": 3}
            convert = side.config.ConvertCustomConfig().set_preserved_attributes(["tag"])
            assert side.convert(prepared, convert).tag == model.tag
        prepared.note = "set on the prepared model"
        convert = bq.ConvertCustomConfig().set_preserved_attributes(["note"])
        made = bq.convert_fx(prepared, convert)
        assert (made.tag, made.note) == ({"version": 3}, "set on the prepared model")
        prepared = both.feed(both.ours.prepare(model, x, {"preserved_attributes": ["tag"]}), x)
        made = bq.convert_fx(prepared)
        assert made.tag == copy.deepcopy(made).tag == {"version": 3}
        assert bq.convert_to_reference_fx(prepared).tag == {"version": 3}
        bq.save(made, tmp_path / "model.bq")
        assert bq.load(tmp_path / "model.bq").tag == {"version": 3}

    def test_modules_as_attributes(self, both: Any) -> None:
        model, x = Model().eval(), image()
        model.aside = nn.Linear(2, 2)
        custom = bq.PrepareCustomConfig().set_preserved_attributes(["aside"])
        prepared = both.feed(both.ours.prepare(model, x, custom), x)
        made = bq.convert_fx(prepared)
        assert torch.equal(made.aside.weight, model.aside.weight)

    def test_missing(self, both: Any, snapshot: Any) -> None:
        """PyTorch leaves out what is not there, silently."""
        model, x = Model().eval(), image()
        prepared = both.feed(both.ours.prepare(model, x), x)
        custom = bq.ConvertCustomConfig().set_preserved_attributes(["tag"])
        with pytest.raises(ConfigError) as caught:
            bq.convert_fx(prepared, custom)
        snapshot("convert-no-attribute", caught.value)

    @pytest.mark.parametrize("remove", [True, False])
    def test_qconfigs_of_modules(self, both: Any, remove: bool) -> None:
        model, x = Model().eval(), image()
        prepared = both.feed(both.ours.prepare(model, x), x)
        prepared.head.qconfig = "mine"
        mapping = both.ours.mapping().set_module_name("head", None)
        made = bq.convert_fx(prepared, None, remove, mapping)
        assert hasattr(made.graph_module.head, "qconfig") is not remove
        reference = bq.convert_to_reference_fx(prepared, None, remove, mapping)
        assert hasattr(reference.head, "qconfig") is not remove
        assert prepared.head.qconfig == "mine"


def test_arguments_of_the_wrong_kind(both: Any, snapshot: Any) -> None:
    model, x = Model().eval(), image()
    prepared = both.ours.prepare(model, x)
    with pytest.raises(UsageError) as caught:
        bq.convert_fx(prepared, bq.PrepareCustomConfig())
    snapshot("convert-wrong-config", caught.value)
    with pytest.raises(UsageError, match="not a QConfigMapping"):
        bq.convert_fx(prepared, qconfig_mapping=3)
    with pytest.raises(UsageError, match="not prepared"):
        bq.convert_fx(model)


def test_a_nameless_description_runs_on_pytorchs_engine() -> None:
    """As ``torch.ao``, whose ``BackendConfig`` names no engine; with a name it is a description alone."""
    x, qconfig = torch.rand(4, 8), bq.QConfigMapping().set_global(bq.qconfig.default_qconfig)
    linear = bq.get_backend_config("fbgemm").configs
    for name, engine in (("", torch.backends.quantized.engine), ("mine", None)):
        config = BackendConfig(name).set_backend_pattern_configs(list(linear))
        model = nn.Sequential(nn.Linear(8, 2)).eval()
        prepared = bq.prepare_fx(model, qconfig, (x,), backend_config=config)
        prepared(x)
        quantized = bq.convert_fx(prepared)
        assert (quantized.engine and quantized.engine.name) == engine


def _as_prepared(_: str, names: dict[str, Any]) -> None:
    """The mapping of ``prepare_fx``; a rule's QConfig, or None."""
    ours, x = names["both"].ours, image()
    prepared = names["both"].feed(ours.prepare(Model().eval(), x), x)
    for mapping in (ours.mapping(), ours.mapping().set_module_name("fc", None)):
        ours.reference(prepared, qconfig_mapping=mapping)


BY_HAND = {
    "pass the QConfig of prepare_fx": _as_prepared,
    "pass the mapping of prepare_fx": _as_prepared,
}
