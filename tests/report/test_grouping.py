from __future__ import annotations

from dataclasses import replace

from backquant.report.document import dtype_letters, rules_differ
from backquant.report.model import ReasonRow, Report, Row
from backquant.report.refusals import refusals

NEAR, FAR = (
    ReasonRow("range", "a", "b", "fix 1", "config 1"),
    ReasonRow("dtype", "c", "d", "fix 2", "config 2"),
)


def test_refusals_with_one_reason_stand_together() -> None:
    rows = [
        Row("fc1", "Linear", "fc1", "float", reasons=(NEAR, FAR)),
        Row("act", "Softplus", "act", "float", reasons=(NEAR,)),
        Row("fc2", "Linear", "fc2", "float", reasons=(replace(NEAR, fix="other", node="fc2"), FAR)),
        Row("fc1_1", "Linear", "fc1", "float", reasons=(NEAR, FAR)),
        Row("fc3", "Linear", "fc3", "float", rule="global", reasons=(NEAR, FAR)),
    ]
    first, second, third = refusals(rows)
    assert first.names == ("fc1", "fc2") and first.nodes == ("fc1", "fc2", "fc1_1")
    assert first.reasons == (NEAR, FAR) and first.nearest == (NEAR,)
    assert second.operator == "Softplus" and third.rule == "global"
    assert refusals([]) == []


def test_a_refusal_without_reasons() -> None:
    [group] = refusals([Row("x", "add", "", "float")])
    assert group.nearest == () and group.names == ("x",)


def test_letters_in_order_of_first_use() -> None:
    configs = ["b", "a", "b", "", "c"]
    rows = tuple(Row(str(i), "add", "", "quantized", dtype_config=c) for i, c in enumerate(configs))
    assert dtype_letters(Report("x86", rows=rows)) == {"b": "A", "a": "B", "c": "C"}
    many = tuple(Row(str(i), "add", "", "quantized", dtype_config=f"c{i}") for i in range(28))
    assert list(dtype_letters(Report("x86", rows=many)).values())[25:] == ["Z", "A2", "B2"]


def test_kernels_are_counted_per_call() -> None:
    assert Report("x86", kernels=("a", "b", "b")).kernel_counts == {"b": 2, "a": 1}


def test_rules_for_types_are_not_worth_a_column() -> None:
    assert not rules_differ(
        Report("x86", rows=(Row("a", "x", "", "quantized", rule="object_type add"),))
    )
    assert rules_differ(
        Report("x86", rows=(Row("a", "x", "", "quantized", rule='module_name_regex "a"'),))
    )
