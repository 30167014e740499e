from __future__ import annotations

from dataclasses import replace

from backquant.reason_codes import ReasonCode
from backquant.report.model import ReasonRow, Report, Row
from backquant.report.refusals import paragraphs, refusals

BETWEEN = ReasonRow(ReasonCode.FLOAT_NEIGHBOURS, "quantized", "", place="x86, leave_float")


def reads(name: str) -> ReasonRow:
    return replace(BETWEEN, admitted=f"only between quantized operators, and it reads {name}")


def slower(integer: str) -> ReasonRow:
    return ReasonRow(ReasonCode.SLOWER_THAN_FLOAT, f"integers: {integer}", "float: 1 µs", "keep it")


def row(node: str, operator: str, why: ReasonRow, *inputs: str, cost: int = 0) -> Row:
    return Row(node, operator, node, "float", inputs, reasons=(why,), multiply_adds=cost)


def test_reasons_that_differ_in_what_is_read_are_one() -> None:
    rows = [
        row("add_1", "operator.add", reads("norm_0"), "norm_0", "x"),
        row("add_2", "operator.add", reads("norm_1"), "norm_1", "x"),
        row("mul", "operator.mul", reads("x"), "x", "norm_1"),
    ]
    [found] = paragraphs(refusals(rows))
    assert found.title == "3 operators without multiply-adds" and len(found.parts) == 1
    assert found.reasons[0].admitted == "only between quantized operators, and it reads norm_* or x"
    text = str(Report("x86", rows=tuple(rows)))
    assert text.count("float-neighbours") == 1
    assert "            operator.add  add_1, add_2\n            operator.mul  mul" in text


def test_what_differs_stands_with_the_operators() -> None:
    unread = replace(BETWEEN, admitted="no quantized operator reads its result")
    rows = [
        row("add", "operator.add", reads("norm"), "norm"),
        row("view", ".view()", unread, "add"),
        row("view_1", ".view()", unread, "view"),
    ]
    [found] = paragraphs(refusals(rows))
    assert found.reasons[0].asked == "quantized" and not found.reasons[0].admitted
    assert [found.differing(part) for part in found.parts] == [
        "only between quantized operators, and it reads norm",
        "no quantized operator reads its result",
    ]
    text = str(Report("x86", rows=tuple(rows)))
    assert "  where     x86, leave_float" in text
    assert (
        "            no quantized operator reads its result:\n              .view()  view, view_1"
        in text
    )


def test_operators_that_are_slower_together_stand_together() -> None:
    rows = [
        row("elu", "ELU", slower("3 µs")),
        row("conv", "Conv1d", slower("3 µs"), cost=10),
        row("fc", "Linear", slower("2 µs"), cost=40),
    ]
    [found] = paragraphs(refusals(rows))
    assert [[r.operator for r in part.refusals] for part in found.parts] == [
        ["Linear"],
        ["Conv1d", "ELU"],
    ]
    assert found.title == "3 operators" and found.reasons[0].fix == "keep it"


def test_an_operator_that_multiplies_and_has_no_entry_stands_alone() -> None:
    rows = [
        row("norm", "LayerNorm", ReasonRow("no-entry", "LayerNorm", "x86 has none for LayerNorm")),
        row("roll", "torch.roll", ReasonRow("no-entry", "torch.roll", "x86 has none for it")),
        row("bmm", "torch.bmm", ReasonRow("no-entry", "torch.bmm", "x86 has none for bmm"), cost=4),
    ]
    first, second = paragraphs(refusals(rows))
    assert first.title == "bmm  torch.bmm" and first.reasons[0].admitted == "x86 has none for bmm"
    assert second.has_no_entry and not any(second.differing(part) for part in second.parts)


def test_another_fix_or_rule_is_another_paragraph() -> None:
    rows = [
        row("a", "add", replace(reads("x"), fix="one")),
        row("b", "mul", replace(reads("x"), fix="two")),
        row("c", "mul", replace(reads("x"), fix="two", rule="condition")),
        Row("d", "cat", "", "float"),
        Row("e", "cat", "", "float", rule="global"),
    ]
    assert len(paragraphs(refusals(rows))) == 5


def test_a_name_within_another_is_no_value() -> None:
    """``add`` is read; the ``add`` of ``operator.add`` and of ``add_1`` is not it."""
    texts = ["operator.add of add_1 and add", "operator.add of add_1 and mul"]
    rows = [
        row(name, "sub", replace(BETWEEN, admitted=text), name)
        for name, text in zip(("add", "mul"), texts, strict=True)
    ]
    [found] = refusals(rows)
    assert found.reasons[0].admitted == "operator.add of add_1 and add or mul"
    assert found.read == ("add", "mul")


def test_groups_of_the_same_kinds_are_one_with_their_least_and_greatest_time() -> None:
    rows = [
        row(f"{kind}_{i}", kind, slower(f"{time} µs with one beside it"), cost=cost)
        for i, time in enumerate((9.5, 12, 12.25))
        for kind, cost in (("Conv1d", 5), ("ELU", 0))
    ]
    rows.append(row("alone", "ELU", slower("4.5 µs with one beside it")))
    [found] = paragraphs(refusals(rows))
    assert [found.differing(part) for part in found.parts] == [
        "integers: 9.5 to 12.25 µs with one beside it",
        "integers: 4.5 µs with one beside it",
    ]
    conv, elu = found.parts[0].refusals
    assert (conv.label, conv.multiply_adds) == ("Conv1d_0, Conv1d_1, Conv1d_2", 15)
    assert (elu.label, found.count) == ("ELU_0, ELU_1, ELU_2", 7)
