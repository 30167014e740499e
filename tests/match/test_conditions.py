"""Uses of operators that the backend does not take: refused in the plan, with what was found."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import backquant
from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    GraphPattern,
)
from backquant.backend_config.conditions import condition_from
from backquant.errors import CoverageError, SpecError
from backquant.graph import GraphIndex
from backquant.graph.shapes import GraphValues
from backquant.match import make_plan
from backquant.match.conditions import unmet
from backquant.operators import entries_of
from backquant.operators.facts import UseFacts

X = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
DYNAMIC = backquant.QConfig(
    activation=backquant.PlaceholderObserver.with_args(
        dtype=torch.qint8, is_dynamic=True, quant_min=-128, quant_max=127
    ),
    weight=backquant.PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    ),
)


class Use(nn.Module):
    """A use of an operator after a convolution and before one."""

    def __init__(self, use) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.weight = nn.Parameter(torch.randn(4, 2, 1, 1))
        self.inner = use if isinstance(use, nn.Module) else None
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.inner(x) if self.inner is not None else self.use(x, self.weight)
        return self.last(x)


def reasons(use, mapping=None) -> dict[str, str]:
    """Of each operator that stays float for what it is: what was asked, and what is admitted."""
    report = backquant.explain(Use(use).eval(), X, backend="xnnpack", qconfig_mapping=mapping)
    return {
        row.operator: f"{reason.asked}; {reason.admitted}"
        for row in report.rows
        for reason in row.reasons
        if reason.rule == "condition" and row.outcome == "float"
    }


MEANS = {
    "-3": lambda x, w: x + x.mean(1, keepdim=True),
    "(-4, -3, -2, -1)": lambda x, w: x + x.mean(),
}


@pytest.mark.parametrize("told", MEANS)
def test_means_over_other_axes(told: str) -> None:
    assert reasons(MEANS[told]) == {".mean()": f"dim {told}; dim one of (-2, -1), (2, 3)"}


@pytest.mark.parametrize("axes", [(2, 3), (-1, -2), (3, -2)])
def test_means_over_inner_axes(axes: tuple[int, int]) -> None:
    assert reasons(lambda x, w: x.mean(axes, keepdim=True)) == {}


@pytest.mark.parametrize(
    "use", [nn.ConvTranspose2d(4, 4, 1, groups=2), lambda x, w: F.conv_transpose2d(x, w, groups=2)]
)
def test_a_transposed_convolution_with_groups_takes_one_scale(use) -> None:
    report = backquant.explain(Use(use).eval(), X, backend="xnnpack")
    [row] = [row for row in report.rows if "ranspose" in row.operator]
    assert row.outcome == "float"
    assert "per tensor" in row.reasons[0].admitted
    assert any(reason.asked == "groups 2" for reason in row.reasons)
    # the fix is a weight observer with one scale, and it does
    assert "weight=MinMaxObserver" in row.reasons[0].fix
    mapping = backquant.get_default_qconfig_mapping("xnnpack")
    names = {"torch": torch, "qconfig_mapping": mapping}
    exec(f"from backquant import *\n{row.reasons[0].fix}", names)
    assert reasons(use, mapping) == {}
    report = backquant.explain(Use(use).eval(), X, backend="xnnpack", qconfig_mapping=mapping)
    assert all(row.outcome == "quantized" for row in report.rows)


def test_depthwise_convolutions_are_not_dynamic() -> None:
    mapping = backquant.QConfigMapping().set_object_type(nn.Conv2d, DYNAMIC)
    depthwise = nn.Conv2d(4, 4, 1, groups=4)
    assert reasons(depthwise, mapping) == {
        "Conv2d": "groups 4, in_channels 4; not (groups = in_channels)"
    }
    assert reasons(nn.Conv2d(4, 4, 1, groups=2), mapping) == {}
    assert reasons(depthwise) == {}


@pytest.mark.parametrize(
    "use",
    [
        nn.ConvTranspose2d(4, 4, 4, stride=(2, 4)),
        lambda x, w: F.conv_transpose2d(x, w.repeat(1, 2, 4, 4), None, (2, 4)),
        lambda x, w: F.conv_transpose2d(x, w.repeat(1, 2, 4, 4), stride=4),
    ],
)
def test_a_transposed_convolution_with_a_long_stride(use) -> None:
    report = backquant.explain(Use(use).eval(), X, backend="openvino")
    [row] = [row for row in report.rows if "ranspose" in row.operator]
    [reason] = row.reasons
    assert (reason.rule, reason.asked) == ("condition", "stride[-1] 4")
    assert reason.admitted == "stride[-1] ≤ 2"


def backend(where, pattern=nn.Conv2d, own=None) -> BackendConfig:
    """One entry for int8, with a condition on it and one on its only dtype config."""
    int8 = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float, where=own)
    weighted = pattern in (nn.Conv2d, nn.Linear, nn.ConvTranspose2d)
    plain = DTypeConfig(torch.qint8, torch.qint8, where=own)
    entry = BackendPatternConfig(pattern).add_dtype_config(int8 if weighted else plain)
    if weighted:
        reference = getattr(backquant.nn.quantized.reference, pattern.__name__)
        entry.set_root_module(pattern).set_reference_quantized_module(reference)
    return BackendConfig("npu").set_backend_pattern_config(entry.set_where(where))


INT8 = backquant.QConfig(
    activation=backquant.MinMaxObserver.with_args(dtype=torch.qint8),
    weight=backquant.PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    ),
)
ASKED = backquant.QConfigMapping().set_global(INT8)


def told(module, where, x=X, **more):
    """The first reason of the only operator of interest; None if it is quantized."""
    report = backquant.explain(
        module.eval(), x, backend=backend(where, **more), qconfig_mapping=ASKED
    )
    row = next(row for row in report.rows if row.reasons or row.outcome == "quantized")
    return row.reasons[0] if row.outcome == "float" else None


CONV = {"in_channels": 4, "out_channels": 8, "kernel_size": (3, 5), "padding": (1, 0)}
# what holds for the convolution, and what does not
BOTH_SIDES = [
    ({"kernel_size": {"max": 5}}, {"kernel_size": {"max": 4}}),
    ({"kernel_height": 3}, {"kernel_width": 3}),
    ({"kernel_height * kernel_width": {"max": 15}}, {"product(kernel_size)": {"max": 14}}),
    ({"stride": [1, 2]}, {"stride": {"min": 2}}),
    ({"padding_height": 1}, {"padding": 1}),
    ({"not": {"padding": 0}}, {"padding": {"not": {"max": 1}}}),
    ({"groups": 1}, {"groups": {"equals": "in_channels"}}),
    ({"in_channels": {"multiple_of": 4}}, {"out_channels": {"multiple_of": 16}}),
    ({"rank": {"max": 4}}, {"rank": {"max": 3}}),
    ({"batch": 1}, {"output.batch": 2}),
    ({"dims": {"max": 8}}, {"dims": {"max": 7}}),
    ({"elements": {"max": 144}}, {"input.elements": {"max": 143}}),
    ({"shape": "static"}, {"shape": "dynamic"}),
    ({"dtype": "float32"}, {"dtype": ["int64", "bool"]}),
    ({"weight.dims[0]": 8}, {"weight.dims[1:]": {"max": 4}}),
    ({"output.height": {"equals": "height"}}, {"output.dims": {"equals": "input.dims"}}),
    ({"output.width / input.width": {"max": 0.5}}, {"count(dims)": 3}),
    ({"padding_mode": "zeros"}, {"padding_mode": "reflect"}),
    ({"weight.constant": True}, {"input.constant": True}),
    ({"any": [{"batch": 2}, {"rank": 4}]}, {"any": [{"batch": 2}, {"rank": 3}]}),
    ({"weight_sums": {"max": 127 * 60}}, {"weight_sums": {"max": 126}}),
]


@pytest.mark.parametrize(("holds", "fails"), BOTH_SIDES, ids=str)
def test_both_sides_of_a_condition(holds, fails) -> None:
    conv = nn.Sequential(nn.Conv2d(**CONV))
    assert told(conv, holds) is None
    assert told(conv, None, own=holds) is None
    for reason in (told(conv, fails), told(conv, None, own=fails)):
        assert reason is not None and reason.rule == "condition"
        assert reason.asked and reason.admitted == str(condition_from(fails))


def test_reasons(snapshot) -> None:
    conv = nn.Sequential(nn.Conv2d(**CONV))
    wheres = [fails for _, fails in BOTH_SIDES]
    texts = [f"{where}\n{told(conv, where)}" for where in wheres if "weight_sums" not in where]
    snapshot("conditions", "\n\n".join(texts))


@pytest.mark.parametrize(
    ("module", "where", "holds"),
    [
        (nn.MaxPool2d(3), {"stride": 3, "kernel_size": 3}, True),
        (nn.MaxPool2d(3, 2, padding=1), {"padding": 0}, False),
        (nn.GELU("tanh"), {"approximate": "none"}, False),
        (nn.Upsample(scale_factor=2, mode="bilinear"), {"mode": "bilinear"}, True),
        (nn.Upsample(scale_factor=2), {"output.height / input.height": [2, 4]}, True),
        (nn.Upsample(scale_factor=3), {"output.height / input.height": [2, 4]}, False),
        (nn.Softmax(dim=1), {"dim": -1}, False),
        (nn.Softmax(dim=3), {"dim": -1}, True),
        (nn.Linear(6, 4), {"in_channels": 6, "out_channels": 4, "groups": 1}, True),
        (nn.ConvTranspose2d(4, 8, 2, stride=2), {"stride": 2, "output.height": 12}, True),
        (nn.Conv2d(4, 4, 3, padding="same"), {"padding": 1}, True),
    ],
    ids=str,
)
def test_conditions_on_modules(module, where, holds: bool) -> None:
    assert (told(nn.Sequential(module), where, pattern=type(module)) is None) is holds


class Calls(nn.Module):
    """Calls one function of an activation and a weight of its own."""

    def __init__(self, call) -> None:
        super().__init__()
        self.call, self.weight = call, nn.Parameter(torch.randn(8, 4, 3, 5))

    def forward(self, x):
        return self.call(x, self.weight)


@pytest.mark.parametrize(
    ("op", "call", "where", "holds"),
    [
        (F.conv2d, lambda x, w: F.conv2d(x, w, stride=2), {"kernel_width": 5, "stride": 2}, True),
        (F.conv2d, F.conv2d, {"in_channels": 4, "out_channels": 8}, True),
        (F.max_pool2d, lambda x, w: F.max_pool2d(x, 3), {"stride": 3, "dilation": 1}, True),
        (F.interpolate, lambda x, w: F.interpolate(x, scale_factor=2), {"mode": "nearest"}, True),
        (torch.cat, lambda x, w: torch.cat([x, x], 1), {"dim": -3, "output.channels": 8}, True),
        (torch.add, lambda x, w: torch.add(x, 2.0), {"other.constant": True}, True),
        (torch.add, lambda x, w: torch.add(x, x), {"other.constant": True}, False),
        (torch.add, lambda x, w: torch.add(x, w[:1, :, :1, :1]), {"other.dims[1:]": [4, 1]}, True),
        (torch.mean, lambda x, w: torch.mean(x, (2, 3)), {"dim": {"equals": [-2, -1]}}, True),
        (F.softmax, lambda x, w: F.softmax(x, dim=1), {"dim": -1}, False),
    ],
)
def test_conditions_on_functions(op, call, where, holds: bool) -> None:
    assert (told(Calls(call), where, pattern=op) is None) is holds


def test_what_is_not_known_is_refused_with_what_would_tell() -> None:
    graph = backquant.graph.capture(nn.Sequential(nn.Conv2d(4, 4, 1)).eval())
    plan = make_plan(graph.module, graph.scopes, backend({"batch": 1}), ASKED)
    [reason] = plan.decisions["_0"].reasons
    assert reason.asked == "the shape of the inputs is not known: no example inputs"
    assert reason.fix.startswith("give example inputs")
    known = make_plan(graph.module, graph.scopes, backend({"kernel_size": 1}), ASKED)
    assert known.decisions["_0"].quantized


def test_a_quantity_that_the_operator_has_not_is_refused() -> None:
    reason = told(nn.Sequential(nn.Linear(6, 4)), {"stride": 1}, pattern=nn.Linear)
    assert reason.asked == "Linear has no stride"


def test_free_sizes_are_dynamic() -> None:
    free = {"dynamic_shapes": ({0: torch.export.Dim("batch", min=1, max=8)},)}
    config, model = backend({"shape": "static"}), nn.Sequential(nn.Conv2d(4, 4, 1)).eval()
    x = torch.randn(2, 4, 6, 6)
    fixed = backquant.explain(model, x, backend=config, qconfig_mapping=ASKED, capture="export")
    assert fixed.coverage == 1.0
    report = backquant.explain(model, x, backend=config, qconfig_mapping=ASKED, **free)
    [row] = [row for row in report.rows if row.outcome == "float"]
    assert "dynamic" in row.reasons[0].asked


def test_every_flow_knows_the_shapes() -> None:
    config, model = backend({"height": 6}), nn.Sequential(nn.Conv2d(4, 4, 1)).eval()
    prepared = backquant.prepare_fx(model, ASKED, X, backend_config=config)
    prepared(X)
    mapping = copy.deepcopy(ASKED).set_module_name("nowhere", None)
    quantized = backquant.convert_fx(prepared, qconfig_mapping=mapping)
    assert quantized.plan.decisions["_0"].quantized
    trained = backquant.prepare_qat_fx(model.train(), ASKED, X, backend_config=config)
    assert trained.report.coverage == 1.0
    assert model[0].training
    with pytest.raises(CoverageError, match="height 7"):
        backquant.quantize(model, torch.randn(1, 4, 7, 7), backend=config, calibration=[X])


def test_a_fused_pattern_is_asked_about_each_of_its_operators() -> None:
    int8 = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
    pattern = GraphPattern(
        ["x", "w", "rest"],
        {"conv": (F.conv2d, "x", "w"), "sum": (torch.add, "conv", "rest"), "out": (F.relu, "sum")},
    )
    entry = BackendPatternConfig(pattern).add_dtype_config(int8).set_ports({"w": "weight"})
    model = Calls(lambda x, w: F.relu(torch.add(F.conv2d(x, w), x[:, :1, :4, :2]))).eval()
    for where, holds in (
        ({"kernel_width": 5, "rest.channels": 1, "sum.alpha": 1}, True),
        ({"rest.channels": 8}, False),
        ({"kernel_width": 3}, False),
    ):
        config = BackendConfig("b").set_backend_pattern_config(entry.set_where(where))
        report = backquant.explain(model, X, backend=config, qconfig_mapping=ASKED)
        outcomes = [row.outcome for row in report.rows if row.operator.endswith("relu")]
        assert (outcomes == ["quantized"]) is holds


FIXES = {
    "one bound": ({"kernel_size": 9}, {"kernel_size": {"max": 7}}, {}),
    "several": (
        {"kernel_size": 9, "stride": 4},
        {"kernel_size": {"max": 7}, "stride": {"max": 3}},
        {},
    ),
    "a step below a bound": (
        {"out_channels": 30},
        {"out_channels": {"multiple_of": 16, "max": 24}},
        {},
    ),
    "of the dtype config": (
        {"out_channels": 30},
        {"out_channels": {"multiple_of": 4}},
        {"out_channels": {"max": 24}},
    ),
    "groups divide": ({"in_channels": 9, "out_channels": 3}, {"groups": {"min": 2}}, {}),
    "groups of the channels": ({}, {"groups": {"equals": "in_channels"}}, {}),
    "not": ({"dilation": 2}, {"not": {"dilation": 2}}, {}),
    "not of each": ({"dilation": (2, 1)}, {"dilation": {"not": [2, 4]}}, {}),
    "not, and a bound": ({"dilation": 3}, {"dilation": {"max": 3}, "not": {"dilation": 3}}, {}),
    "one of two": ({"stride": 4}, {"any": [{"stride": {"max": 3}}, {"kernel_size": 1}]}, {}),
    "both of a branch": (
        {"stride": 4, "dilation": 2},
        {"any": [{"kernel_size": 1}, {"all": [{"stride": {"max": 3}}, {"dilation": 1}]}]},
        {},
    ),
    "a word": (
        {"padding_mode": "reflect", "padding": 1},
        {"padding_mode": ["zeros", "circular"]},
        {},
    ),
}
REPLACED = re.compile(r"(\w+) (\S+) in place of (\S+)")


@pytest.mark.parametrize("name", FIXES)
def test_fixes_help(name: str) -> None:
    changed, where, own = FIXES[name]
    given = {"in_channels": 8, "out_channels": 16, "kernel_size": 3, **changed}

    def reasons_of(arguments: dict[str, Any]) -> tuple[Any, ...]:
        x, model = (
            torch.randn(1, arguments["in_channels"], 24, 24),
            nn.Sequential(nn.Conv2d(**arguments)),
        )
        config = backend(where, own=own or None)
        report = backquant.explain(model, x, backend=config, qconfig_mapping=ASKED)
        [row] = report.rows
        return row.reasons

    fixes = [reason.fix for reason in reasons_of(given)]
    assert fixes and all(fixes)
    for choice in range(max(fix.count(", or ") for fix in fixes) + 1):
        told = " and ".join(fix.split(", or ")[choice] for fix in fixes)
        new = {
            name: value if value.isalpha() else int(value)
            for name, value, _ in REPLACED.findall(told)
        }
        assert reasons_of({**given, **new}) == (), (told, new)


def test_no_fix_where_there_is_none() -> None:
    x = torch.randn(1, 8, 4, 4)
    reason = told(nn.Sequential(nn.Conv2d(8, 3, 1)), {"groups": {"min": 2}}, x)
    assert (reason.rule, reason.fix) == ("condition", "")


# -- parameters that are lists, by any of their names; operands in any order; what stands around --------
IMAGE = torch.zeros(1, 4, 6, 6)


def _two_readers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, F.relu(x)


HOLDS = {
    "count": (lambda x: F.pad(x, (1, 1, 0, 0)), {"count(pad)": 4, "sum(pad[2:])": 0}, True),
    "items": (lambda x: F.pad(x, (1, 1, 0, 0, 1, 1)), {"pad[4:]": 0}, False),
    "each": (lambda x: F.pad(x, (1, 1, 0, 0)), {"pad": {"max": 1}}, True),
    "whole": (lambda x: F.pad(x, (1, 1, 0, 0)), {"pad": [[1, 1, 0, 0], [0, 0]]}, True),
    "module": (nn.ConstantPad2d((1, 2, 1, 1), 0.0), {"sum(pad)": 5, "mode": "constant"}, True),
    "layer_norm": (nn.LayerNorm((6, 6)), {"count(normalized_shape)": 1}, False),
    "split": (lambda x: x.split(2, 1)[0], {"split_size_or_sections": 2, "axis": -3}, True),
    "sections": (lambda x: torch.split(x, [1, 3], 1)[0], {"max(split_sizes)": {"max": 2}}, False),
    "axis": (lambda x: x.mean(axis=(2, 3)), {"dim": [-1, -2]}, True),
    "axes": (lambda x: x.mean((1, 2)), {"dim": [-1, -2]}, False),
    "sign": (lambda x: x**2, {"exponent": 2}, True),
    "power": (lambda x: torch.pow(x, 3), {"exponent": 2}, False),
    "bounds": (nn.Hardtanh(-1, 2), {"max_val": 2, "min_value": -1}, True),
    "default": (lambda x: x + x, {"alpha": 1}, True),
    "other_default": (nn.Upsample(scale_factor=2), {"antialias": False}, True),
    "no_default": (lambda x: F.layer_norm(x, (6,)), {"elementwise_affine": True}, False),
    "number_first": (lambda x: 2 * x, {"other.constant": True}, True),
    "number_last": (lambda x: x * 2, {"other.constant": True}, True),
    "in_order": (lambda x: 2 - x, {"other.constant": True}, False),
    "last": (lambda x: F.softmax(x, 1), {"read_by": "output"}, True),
    "dropped": (lambda x: F.dropout(F.softmax(x, 1)), {"read_by": "output"}, True),
    "not_last": (lambda x: F.relu(F.softmax(x, 1)), {"read_by": "output"}, False),
    "shape_alone": (lambda x: x.view(x.size(0), -1), {"reads": "input"}, True),
    "one_of_two": (lambda x: _two_readers(F.gelu(x)), {"read_by": {"not": "add"}}, False),
    "neither": (lambda x: F.relu(F.gelu(x)), {"read_by": {"not": "add"}}, True),
    "first": (nn.Conv2d(4, 4, 1), {"reads": "input"}, True),
    "not_one": (nn.Conv2d(4, 4, (2, 3)), {"kernel_size": {"not": [2, 4, 6]}}, False),
    "not_any": (nn.Conv2d(4, 4, (3, 5)), {"kernel_size": {"not": [2, 4, 6]}}, True),
    "not_all": (nn.Conv2d(4, 4, (2, 3)), {"not": {"kernel_size": 2}}, True),
    "not_between": (nn.Conv2d(4, 4, (2, 3)), {"kernel_size": {"not": {"min": 3, "max": 4}}}, False),
    "not_bounds": (nn.Conv2d(4, 4, (2, 5)), {"kernel_size": {"not": {"min": 3, "max": 4}}}, True),
    "not_not": (nn.Conv2d(4, 4, (2, 2)), {"kernel_size": {"not": {"not": 2}}}, True),
}


@pytest.mark.parametrize("name", HOLDS)
def test_what_holds_of_a_use(name: str) -> None:
    use, where, holds = HOLDS[name]
    graph = fx.symbolic_trace(nn.Sequential(use) if isinstance(use, nn.Module) else use)
    calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
    node = next(each for each in calls if each.target != "size")
    facts = UseFacts(GraphIndex(graph), GraphValues(graph, (IMAGE,)), node, node)
    found = [unmet(condition_from(where), each) for each in facts.orders()]
    assert any(not refusals for refusals in found) is holds


def test_a_stride_where_an_addition_follows() -> None:
    int8 = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
    entries = entries_of(["conv2d"], [int8])
    where = {"any": [{"stride": 1}, {"read_by": {"not": "add"}}]}
    backend = BackendConfig("b").set_backend_pattern_configs([e.set_where(where) for e in entries])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(4, 4, 1, stride=2), nn.Conv2d(4, 4, 1, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(x).relu() + self.one(x)

    rows = {row.node: row for row in backquant.explain(Model().eval(), X, backend=backend).rows}
    assert rows["two"].outcome == "quantized"
    assert [reason.rule for reason in rows["one"].reasons] == ["condition"]


def test_an_operator_before_has_a_known_name() -> None:
    with pytest.raises(SpecError, match="soft_max"):
        BackendPatternConfig(nn.Conv2d).set_where({"reads": "soft_max"})
