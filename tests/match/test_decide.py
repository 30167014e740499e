"""Outcomes and reasons that are ours: spelled-out cases."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    MatchAllNode,
    ObservationType,
    get_backend_config,
)
from backquant.errors import ConfigError
from backquant.graph import capture
from backquant.match import (
    CustomMatching,
    MatchKind,
    MeasuredScales,
    Outcome,
    Plan,
    make_plan,
    recheck,
)
from backquant.observe import MinMaxObserver, PerChannelMinMaxObserver
from backquant.qconfig import (
    QConfig,
    QConfigMapping,
    QuantType,
    default_qconfig,
    get_default_qconfig_mapping,
)

INT8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)


def backend_of(*entries: BackendPatternConfig, name: str = "mine") -> BackendConfig:
    return BackendConfig(name).set_backend_pattern_configs(entries)


def int8(pattern: Any) -> BackendPatternConfig:
    return BackendPatternConfig(pattern).add_dtype_config(INT8)


def decide(
    model: nn.Module,
    backend: BackendConfig,
    mapping: QConfigMapping | None = None,
    **custom: Any,
) -> Plan:
    matching = CustomMatching(**{k: frozenset(v) for k, v in custom.items()})
    captured = capture(
        model.eval(),
        non_traceable_names=matching.untraced_names,
        non_traceable_classes=matching.untraced_classes,
    )
    asked = mapping or QConfigMapping().set_global(default_qconfig)
    return make_plan(captured.module, captured.scopes, backend, asked, custom=matching)


def functional(function: Any) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 2))

        def forward(self, x, y):
            return function(self, x, y)

    return Net()


class TestOutcomes:
    def test_every_calling_node_has_one_decision_in_graph_order(self) -> None:
        net = functional(lambda self, x, y: F.relu(F.linear(x, self.w)) + y.view(y.size(0), -1))
        decided = decide(net, get_backend_config("x86"))
        assert list(decided.decisions) == ["linear", "relu", "size", "view", "add"]
        assert [d.outcome.value for d in decided.decisions.values()] == [
            "quantized", "quantized", "not_tensor", "quantized", "quantized",
        ]  # fmt: skip
        assert decided.decisions["linear"].match == decided.decisions["relu"].match
        match = decided.matches[decided.decisions["relu"].match or 0]
        assert (match.nodes, match.root, match.anchor) == (("linear", "relu"), "linear", "relu")
        assert decided.no_tensors == ("size",)

    def test_masks_and_indices_are_no_tensors(self) -> None:
        net = functional(lambda self, x, y: x.masked_fill(torch.add(y, 1), 0.0))
        decided = decide(net, get_backend_config("x86"))
        assert decided.decisions["add"].outcome is Outcome.NOT_TENSOR
        assert set(decided.no_tensors) == {
            "add",
            "y",
        }  # a number beside a mask makes no floats of it

    def test_no_rule_at_all(self) -> None:
        net = functional(lambda self, x, y: x + y)
        decision = decide(net, get_backend_config("x86"), QConfigMapping()).decisions["add"]
        assert decision.outcome is Outcome.FLOAT
        assert decision.rule is None
        assert decision.reasons[0].asked == "no rule of the QConfigMapping applies"
        assert decision.reasons[0].fix.endswith('0, get_default_qconfig("x86"))')

    def test_no_entry_names_the_nearest(self) -> None:
        net = functional(lambda self, x, y: torch.bmm(x, y))
        decision = decide(net, backend_of(int8(torch.mm), int8(torch.add))).decisions["bmm"]
        (reason,) = decision.reasons
        assert (reason.rule, reason.admitted) == (
            "no-entry",
            "mine has no entry for torch.bmm; nearest: torch.mm",
        )

    @pytest.mark.parametrize("product", [operator.matmul, torch.bmm, lambda x, y: x.matmul(y)])
    def test_no_entry_names_the_spelling_that_has_one(self, product) -> None:
        net = functional(lambda self, x, y: product(x, y))
        decided = decide(net, get_backend_config("x86"))
        (reason,) = next(d.reasons for d in decided.decisions.values() if d.reasons)
        assert reason.admitted.endswith("but one for torch.matmul, the same operator")
        assert reason.fix.startswith("write it as torch.matmul; ")

    def test_operator_known_only_inside_of_longer_patterns(self) -> None:
        net = nn.Sequential(nn.BatchNorm2d(1))
        decision = decide(net, backend_of(int8((nn.Conv2d, nn.BatchNorm2d)))).decisions["_0"]
        assert decision.reasons[0].admitted == (
            'mine has BatchNorm2d only within "Conv2d, BatchNorm2d"'
        )

    def test_untraced_module(self) -> None:
        class Odd(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        net = nn.Sequential(Odd(), nn.ReLU())
        decided = decide(net, get_backend_config("x86"), non_traceable_names=["0"])
        assert decided.decisions["_0"].reasons[0].rule == "not-traced"
        assert decided.decisions["_1"].quantized

    def test_entry_without_dtype_configs(self) -> None:
        decision = decide(
            nn.Sequential(nn.ReLU()), backend_of(BackendPatternConfig(nn.ReLU))
        ).decisions["_0"]
        assert decision.reasons[0].rule == "no-dtype-config"

    def test_qconfig_that_makes_no_observer(self) -> None:
        mapping = QConfigMapping().set_global(QConfig(nn.ReLU, nn.ReLU))
        with pytest.raises(ConfigError, match="neither an observer") as caught:
            decide(nn.Sequential(nn.ReLU()), get_backend_config("x86"), mapping)
        assert "QConfigMapping: global" in caught.value.where

    def test_unreached_entries(self) -> None:
        decided = decide(nn.Sequential(nn.ReLU()), backend_of(int8(nn.Tanh), int8(nn.ReLU)))
        assert decided.unreached_entries == (0,)


class TestObservation:
    COUNTS = {  # noqa: RUF012
        1: ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT,
        2: ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT,
    }

    def entry(self) -> BackendPatternConfig:
        return int8(torch.add)._set_num_tensor_args_to_observation_type(self.COUNTS)

    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            (lambda self, x, y: torch.add(x, y), "OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT"),
            (lambda self, x, y: torch.add(x, 2), "OUTPUT_SHARE_OBSERVER_WITH_INPUT"),
            (lambda self, x, y: torch.add(x, y.size(0)), "OUTPUT_SHARE_OBSERVER_WITH_INPUT"),
            (lambda self, x, y: torch.add(2, y), "OUTPUT_SHARE_OBSERVER_WITH_INPUT"),
            (
                lambda self, x, y: torch.add(input=x, other=y),
                "OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT",
            ),
        ],
    )
    def test_number_of_tensors(self, function: Any, expected: str) -> None:
        decided = decide(functional(function), backend_of(self.entry()))
        assert decided.decisions["add"].quantized
        assert decided.decisions["add"].observation == expected

    def test_no_tensor_at_all(self) -> None:
        """As in PyTorch, which lists a type for 0 tensors and never observes such a call."""
        net = functional(lambda self, x, y: torch.add(x, torch.add(y.size(0), 1)))
        decided = decide(net, get_backend_config("x86")).decisions
        assert decided["add"].outcome is Outcome.NOT_TENSOR
        assert decided["add_1"].observation == "OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT"

    def test_number_without_a_type_is_refused(self) -> None:
        counts = {2: ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT}
        entry = int8(torch.add)._set_num_tensor_args_to_observation_type(counts)
        net = functional(lambda self, x, y: torch.add(x, 2))
        decision = decide(net, backend_of(entry)).decisions["add"]
        assert (decision.outcome, decision.reasons[0].rule) == (Outcome.FLOAT, "tensor-count")
        assert decision.reasons[0].asked == "1 tensor arguments"


class TestSpelling:
    @pytest.mark.parametrize(
        "function",
        [
            lambda self, x, y: F.relu(F.linear(x, self.w)),
            lambda self, x, y: F.relu(F.linear(x, self.w), True),
            lambda self, x, y: F.relu(F.linear(x, self.w), inplace=True),
            lambda self, x, y: F.relu(input=F.linear(x, self.w)),
            lambda self, x, y: F.relu(input=F.linear(input=x, weight=self.w)),
        ],
    )
    def test_keywords_are_arguments(self, function: Any) -> None:
        decided = decide(functional(function), get_backend_config("x86"))
        assert [match.nodes for match in decided.matches] == [("linear", "relu")]
        assert decided.decisions["linear"].quantized

    def test_weight_by_keyword_is_a_weight(self) -> None:
        wrong = QConfig(MinMaxObserver, MinMaxObserver.with_args(dtype=torch.quint8))
        net = functional(lambda self, x, y: F.linear(x, weight=self.w))
        mapping = QConfigMapping().set_global(wrong)
        decision = decide(net, get_backend_config("x86"), mapping).decisions["linear"]
        assert decision.reasons[0].asked == "weight quint8 [0, 255]"

    def test_inner_value_used_elsewhere_is_no_match(self) -> None:
        def twice(self, x, y):
            z = F.linear(x, self.w)
            return F.relu(z) + z

        decided = decide(functional(twice), get_backend_config("x86"))
        assert [match.nodes for match in decided.matches] == [("linear",), ("relu",), ("add",)]

    def test_literals_and_any(self) -> None:
        entry = BackendPatternConfig().add_dtype_config(INT8)
        entry._set_pattern_complex_format((operator.getitem, (torch.split, MatchAllNode, 2), 0))
        entry._set_root_node_getter(lambda pattern: pattern[1])
        net = functional(lambda self, x, y: torch.split(x, 2)[0] + torch.split(y, 2)[1])
        decided = decide(net, backend_of(entry))
        assert [(m.nodes, m.root) for m in decided.matches] == [(("split", "getitem"), "split")]

    def test_root_getters_get_pytorchs_shape(self) -> None:
        shapes: list[Any] = []

        def getter(pattern: list[Any]) -> Any:
            shapes.append(pattern)
            return pattern[2]

        entry = BackendPatternConfig().add_dtype_config(INT8)
        entry._set_pattern_complex_format((torch.add, MatchAllNode, (F.relu, F.linear)))
        entry._set_root_node_getter(getter)
        net = functional(lambda self, x, y: torch.add(y, F.relu(F.linear(x, self.w))))
        decided = decide(net, backend_of(entry))
        assert decided.matches[0].nodes == ("linear", "relu", "add")
        assert [str(value) for value in shapes[0]] == ["add", "y", "relu", "linear"]


class TestCustom:
    def test_standalone_and_custom_modules(self) -> None:
        class Mine(nn.Module):
            def forward(self, x):
                return x

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(2, 2)

            def forward(self, x):
                return self.fc(x)

        net = nn.Sequential(Mine(), Block(), Block())
        decided = decide(
            net,
            get_backend_config("x86"),
            standalone_names=["1"],
            custom_modules=[(QuantType.STATIC, Mine)],
        )
        kinds = {match.root: match.kind for match in decided.matches}
        assert kinds == {
            "_0": MatchKind.CUSTOM_MODULE,
            "_1": MatchKind.STANDALONE,
            "_2_fc": MatchKind.PATTERN,
        }
        assert all(decision.quantized for decision in decided.decisions.values())

    def test_skipped_custom_module(self) -> None:
        class Mine(nn.Module):
            def forward(self, x):
                return x

        mapping = QConfigMapping().set_global(default_qconfig).set_object_type(Mine, None)
        decided = decide(
            nn.Sequential(Mine()),
            get_backend_config("x86"),
            mapping,
            custom_modules=[(QuantType.STATIC, Mine)],
        )
        assert decided.decisions["_0"].outcome is Outcome.FLOAT

    def test_from_a_prepare_custom_config(self) -> None:
        from backquant.qconfig import PrepareCustomConfig

        config = PrepareCustomConfig().set_non_traceable_module_names(["a.b"])
        assert CustomMatching.of(config).untraced_names == {"a.b"}


class TestGetters:
    def entry(self, getter: Any) -> BackendPatternConfig:
        return int8((nn.Linear, nn.ReLU))._set_root_node_getter(getter)

    @pytest.mark.parametrize(
        "getter", [lambda pattern: 1 / 0, lambda pattern: None, lambda pattern: pattern[1].args[0]]
    )
    def test_bad_root_getter_is_named(self, getter: Any) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        with pytest.raises(ConfigError, match="root getter") as caught:
            decide(net, backend_of(self.entry(getter)))
        assert "entry 0" in caught.value.where
        assert "'_1'" in caught.value.where

    def test_chosen_root(self) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        decided = decide(net, backend_of(self.entry(lambda pattern: pattern[0])))
        assert decided.matches[0].root == "_1"


class TestMeasured:
    def decided(self) -> Plan:
        demand = DTypeWithConstraints(torch.quint8, scale_max_upper_bound=0.5)
        entry = BackendPatternConfig((nn.Linear, nn.ReLU)).set_root_module(nn.Linear)
        weight = DTypeWithConstraints(torch.qint8, power_of_two_scale=True)
        entry.add_dtype_config(DTypeConfig(torch.quint8, demand, weight, torch.float))
        return decide(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend_of(entry))

    def test_predicates_are_data(self) -> None:
        found = [(p.node, p.role, p.rule, p.bound) for p in self.decided().predicates]
        assert found == [
            ("_1", "weight", "power-of-two-scale", None),
            ("_1", "output", "scale-max", 0.5),
        ]

    def test_within_bounds_nothing_changes(self) -> None:
        decided = self.decided()
        fine = [
            MeasuredScales("_1", "output", (0.5,)),
            MeasuredScales("_1", "weight", (0.25, 2**-9)),
        ]
        assert recheck(decided, fine) == decided

    @pytest.mark.parametrize(
        ("role", "scales", "rule"),
        [("output", (0.75,), "scale-max"), ("weight", (0.25, 0.3), "power-of-two-scale")],
    )
    def test_beyond_bounds_the_match_stays_float(
        self, role: str, scales: tuple[float, ...], rule: str
    ) -> None:
        decided = self.decided()
        after = recheck(decided, [MeasuredScales("_1", role, scales)])
        assert [d.outcome for d in decided.decisions.values()] == [Outcome.QUANTIZED] * 2
        for name, decision in after.decisions.items():
            assert decision.outcome is Outcome.FLOAT
            assert [(r.node, r.rule) for r in decision.reasons] == [(name, rule)]
            assert "as measured" in decision.reasons[0].asked

    def test_fixed_scales_are_decided_at_once(self) -> None:
        from backquant.qconfig import default_qconfig as plain

        assert self.decided().predicates
        demand = DTypeWithConstraints(torch.quint8, scale_max_upper_bound=2**-30)
        entry = BackendPatternConfig(nn.ReLU).add_dtype_config(DTypeConfig(demand, demand))
        mapping = QConfigMapping().set_global(plain)
        decision = decide(nn.Sequential(nn.ReLU()), backend_of(entry), mapping).decisions["_0"]
        assert decision.reasons[0].rule == "scale-max"


class TestData:
    def test_round_trip_through_json(self, zoo_model: Any) -> None:
        backend = get_backend_config("qnnpack")
        captured = capture(zoo_model.model)
        mapping = get_default_qconfig_mapping("x86").set_module_name("missing", None)
        decided = make_plan(captured.module, captured.scopes, backend, mapping)
        assert Plan.from_dict(json.loads(json.dumps(decided.to_dict()))) == decided

    def test_an_earlier_name_of_a_field(self) -> None:
        made = Plan("x86", separate_layers=("rnn",)).to_dict()
        earlier = {"apart" if name == "separate_layers" else name: v for name, v in made.items()}
        assert Plan.from_dict(earlier) == Plan("x86", separate_layers=("rnn",))

    @pytest.mark.parametrize(
        "change", [{"decisions": None}, {"unknown": 1}, {"matches": [{"entry": 0}]}]
    )
    def test_broken_plan(self, change: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="no plan"):
            Plan.from_dict({**Plan("x86").to_dict(), **change})

    def test_plan_equals_itself_and_edits_nothing(self, zoo_model: Any) -> None:
        backend = get_backend_config("x86")
        captured = capture(zoo_model.model)
        before = captured.module.code, [dict(n.meta) for n in captured.module.graph.nodes]
        mapping = get_default_qconfig_mapping("x86")
        one = make_plan(captured.module, captured.scopes, backend, mapping)
        two = make_plan(captured.module, captured.scopes, backend, mapping)
        assert one == two
        assert mapping == get_default_qconfig_mapping("x86")
        after = captured.module.code, [dict(n.meta) for n in captured.module.graph.nodes]
        assert before == after

    def test_a_refusal_reads_like_this(self) -> None:
        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.encoder = nn.ModuleDict({"fc2": nn.Linear(2, 2)})

            def forward(self, x):
                return self.encoder["fc2"](x)

        request = QConfig(
            MinMaxObserver.with_args(dtype=torch.qint8, eps=2**-12),
            PerChannelMinMaxObserver.with_args(
                dtype=torch.qint8, qscheme=torch.per_channel_symmetric
            ),
        )
        mapping = QConfigMapping().set_module_name_regex("encoder.*", request)
        decided = decide(Encoder(), get_backend_config("qnnpack"), mapping)
        assert str(decided.decisions["encoder_fc2"]) == "\n".join(
            [
                "encoder.fc2  Linear  stays float",
                "  requested weight qint8 [-128, 127], scale ≥ 2**-23 (eps)"
                '   QConfigMapping: module_name_regex "encoder.*"',
                "  supported weight qint8 [-127, 127], scale ≥ 2**-12"
                '   qnnpack, entry "Linear", dtype config 1 of 3',
                "  fix       qconfig_mapping.set_module_name('encoder.fc2', QConfig(",
                "                activation=MinMaxObserver.with_args(dtype=torch.qint8, "
                "eps=0.000244140625),",
                "                weight=PerChannelMinMaxObserver.with_args(dtype=torch.qint8, "
                "qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127, eps=2**-12)))",
            ]
        )


class Places(nn.Module):
    """Positions of tokens from an integer buffer, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(16, 8)
        self.register_buffer("order", torch.arange(16)[None])
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.cat([torch.narrow(self.order, 1, 0, x.size(1)), self.order], 1)
        return self.last(x + self.places(order)[:, : x.size(1)])


def test_what_is_selected_from_an_integer_buffer_is_no_float_tensor() -> None:
    """PyTorch observes it, and its histograms then refuse to count integers."""
    captured, backend = capture(Places().eval()), get_backend_config("x86")
    mapping = get_default_qconfig_mapping("x86")
    plan = make_plan(captured.module, captured.scopes, backend, mapping)
    outcomes = {name: plan.decisions[name].outcome for name in ("narrow", "cat", "last")}
    assert outcomes["narrow"] is outcomes["cat"] is Outcome.NOT_TENSOR
    assert outcomes["last"] is Outcome.QUANTIZED
