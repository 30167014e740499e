from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.backend_config import (
    AnyOrder,
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    GraphPattern,
    MatchAllNode,
    SequentialFuser,
    from_reversed,
    normal_form,
)
from backquant.backend_config.validate import generalizes, validate

STATIC = DTypeConfig(torch.quint8, torch.quint8)
WEIGHTED = DTypeConfig(torch.quint8, torch.quint8, torch.qint8)


class QatLinear(nn.Linear):
    pass


def entry(pattern: object, config: DTypeConfig = STATIC) -> BackendPatternConfig:
    return BackendPatternConfig(pattern).add_dtype_config(config)


def nested(pattern: object) -> BackendPatternConfig:
    return BackendPatternConfig()._set_pattern_complex_format(pattern).add_dtype_config(STATIC)


def found(*entries: BackendPatternConfig) -> list[tuple[str, str, int | None]]:
    backend = BackendConfig("mine").set_backend_pattern_configs(entries)
    return [(f.severity, f.rule, f.entry) for f in validate(backend)]


def test_a_plain_entry_is_fine():
    assert found(entry(torch.add), entry((nn.Linear, nn.ReLU))) == []


def test_no_dtype_configs():
    assert found(BackendPatternConfig(torch.add)) == [("warning", "no-dtype-configs", 0)]
    fusing = BackendPatternConfig((nn.Linear, nn.ReLU)).set_fused_module(nn.Sequential)
    fusing.set_fuser_method(SequentialFuser(nn.Sequential))
    assert found(fusing) == [("note", "no-dtype-configs", 0)]


def test_root_and_reference_module():
    rooted = entry(nn.Linear).set_root_module(nn.Linear)
    complete = entry("linear").set_root_module(nn.Linear).set_reference_quantized_module(nn.Linear)
    assert found(rooted) == [("error", "root-without-reference", 0)]
    assert found(rooted, complete) == [("note", "root-without-reference", 0)]
    unused = entry(nn.Linear).set_reference_quantized_module(nn.Linear)
    assert found(unused) == [("warning", "reference-without-root", 0)]


def test_fused_module_and_fuser():
    fuser = SequentialFuser(nn.Sequential)
    pair = (nn.Linear, nn.ReLU)
    assert found(entry(pair).set_fused_module(nn.Sequential)) == [
        ("error", "fused-without-fuser", 0)
    ]
    assert found(entry(pair).set_fuser_method(fuser)) == [("note", "fuser-without-fused", 0)]
    fusing = entry(pair).set_fused_module(nn.Sequential).set_fuser_method(fuser)
    assert found(fusing, entry(nn.Sequential)) == []
    assert found(fusing) == [("warning", "fused-module-without-entry", 0)]
    folded = entry((nn.Conv2d, nn.BatchNorm2d)).set_fused_module(nn.Sequential)
    assert found(folded.set_fuser_method(fuser)) == []  # for inference a convolution is made
    single = entry(nn.Linear).set_fuser_method(fuser)
    assert found(single) == [("error", "fuser-on-single", 0)]


def test_qat_module_without_entry():
    trained = entry(nn.Linear).set_qat_module(QatLinear)
    assert found(trained) == [("warning", "qat-module-without-entry", 0)]
    assert found(trained, entry(QatLinear)) == []


@pytest.mark.parametrize("pattern", [torch.nn.functional.linear, "linear", (torch.conv2d, "relu")])
def test_weight_index_missing(pattern):
    assert found(entry(pattern, WEIGHTED)) == [("warning", "weight-index-missing", 0)]
    assert found(entry(pattern, WEIGHTED)._set_input_type_to_index({"weight": 1})) == []
    assert found(entry(pattern, STATIC)) == []


def test_the_weight_index_may_stand_at_the_single_operator():
    single = entry(torch.conv2d, WEIGHTED)._set_input_type_to_index({"weight": 1})
    assert found(single, entry((torch.conv2d, torch.relu), WEIGHTED)) == []


def test_modules_bring_their_weight():
    assert found(entry(nn.Linear, WEIGHTED), entry((nn.Linear, torch.relu), WEIGHTED)) == []


def test_shadowed_patterns():
    wide = nested((torch.add, MatchAllNode, nn.Conv2d))
    narrow = nested((torch.add, nn.ReLU, nn.Conv2d))
    longer = nested((torch.add, (nn.ReLU, nn.Linear), nn.Conv2d))
    assert found(wide, narrow) == [("warning", "pattern-shadowed", 1)]
    assert found(narrow, wide) == []
    assert found(wide, longer) == []  # longer patterns are tried first


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        (torch.add, (torch.add, "a", "b"), True),
        ((torch.add, "a", "b"), torch.add, False),
        ((torch.add, MatchAllNode), (torch.add, MatchAllNode, "b"), False),
        ((torch.add, MatchAllNode, 0), (torch.add, "a", 0), True),
        ((torch.add, MatchAllNode, 0), (torch.add, "a", 1), False),
        ((nn.ReLU, (torch.add, MatchAllNode, "b")), (nn.ReLU, (torch.add, "a", "b")), True),
        ((nn.ReLU, (torch.add, MatchAllNode, "b")), (nn.Tanh, (torch.add, "a", "b")), False),
    ],
)
def test_generalizes(wide, narrow, expected):
    assert generalizes(from_reversed(wide), from_reversed(narrow)) is expected


def test_a_sequence_is_generalized_by_its_last_operator_alone():
    assert generalizes(normal_form(nn.ReLU), normal_form((nn.Linear, nn.ReLU)))


def test_linear_in_the_number_of_entries():
    """Ten times the entries, about ten times the calls: nothing is compared pairwise."""
    calls = 0

    def build(count: int) -> BackendConfig:
        return BackendConfig("big").set_backend_pattern_configs(
            nested((torch.add, f"left{i}", f"right{i}")) for i in range(count)
        )

    import sys

    def count_calls(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    totals = []
    for size in (30, 300):
        backend, calls = build(size), 0
        sys.setprofile(count_calls)
        try:
            assert validate(backend) == []
        finally:
            sys.setprofile(None)
        totals.append(calls)
    assert totals[1] < 12 * totals[0]


def linear_graph() -> BackendPatternConfig:
    nodes = {"fc": (torch.nn.functional.linear, "x", "w"), "out": (torch.relu, "fc")}
    return entry(GraphPattern(["x", "w"], nodes), WEIGHTED)


def test_a_graph_names_the_port_of_its_weight():
    assert found(linear_graph()) == [("warning", "weight-index-missing", 0)]
    assert found(linear_graph().set_ports({"w": "weight"})) == []
    with_root = linear_graph().set_root_module(nn.Linear)
    assert found(with_root.set_reference_quantized_module(nn.Linear)) == []


def test_a_value_that_is_read_twice_generalizes_nothing_else():
    gate = {"gate": (torch.sigmoid, "x"), "out": (torch.mul, "x", "gate")}
    other = {"gate": (torch.sigmoid, "x"), "out": (torch.mul, "y", "gate")}
    swish, gated = GraphPattern(["x"], gate).normal, GraphPattern(["x", "y"], other).normal
    assert generalizes(gated, swish)
    assert not generalizes(swish, gated)


def test_either_order_is_not_generalized_by_one_order():
    one = GraphPattern(["x", "y"], {"out": (torch.mul, "x", "y")}).normal
    any_order = GraphPattern(["x", "y"], {"out": (AnyOrder(torch.mul), "x", "y")}).normal
    assert generalizes(any_order, one)
    assert not generalizes(one, any_order)


class Calls(nn.Module):
    def __init__(self, operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x):
        return self.operator(x)


def test_the_object_of_a_custom_op_matches_nothing(snapshot) -> None:
    @torch.library.custom_op("validated::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    entry = BackendPatternConfig(twice).add_dtype_config(DTypeConfig(torch.qint8, torch.qint8))
    backend = BackendConfig("b").set_backend_pattern_config(entry)
    [finding] = (f for f in validate(backend) if f.rule == "custom-op-object")
    snapshot("custom_op_object", str(finding))
    graph = torch.fx.symbolic_trace(nn.Sequential(Calls(twice))).graph
    [call] = (node for node in graph.nodes if node.op == "call_function")
    assert call.target is twice._opoverload
