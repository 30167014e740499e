from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from rich.table import Table
from rich.text import Text

from backquant.figures import Figures
from backquant.pages.text import render
from backquant.report.document import headline, human_bytes, shortfall
from backquant.report.model import ObserverRow, ReasonRow, Report, Row

INT8 = "input quint8, output quint8, weight qint8, bias float32"
WHY = ReasonRow(
    "weight-range",
    "weight qint8 [-128, 127]",
    "weight qint8 [-127, 127]",
    "QConfig(\n    weight=PerChannelMinMaxObserver.with_args(quant_min=-127))",
    'qnnpack, entry "Linear", dtype config 1 of 4',
)
FURTHER = replace(WHY, rule="dtype", place='qnnpack, entry "Linear", dtype config 2 of 4')
REPORT = Report(
    "qnnpack",
    model="Encoder",
    engine=f"qnnpack (avx2, torch {torch.__version__.split('+')[0]})",
    rows=(
        Row(
            "conv",
            "ConvReLU2d",
            "conv",
            "quantized",
            entry="ConvReLU2d",
            dtype_config=INT8,
            rule="global",
            kernel="quantized.conv2d_relu",
            multiply_adds=221_184,
            observers=(
                ObserverRow(
                    "weight",
                    "weight",
                    "qint8",
                    -128,
                    127,
                    detail="16 scales on axis 0 (0.001 … 0.002)",
                ),
                ObserverRow(
                    "output", "conv", "quint8", 0, 255, 0.0235, 12, shared_with=("pool", "cat")
                ),
            ),
        ),
        Row("size", ".size()", "", "not_tensor"),
        Row(
            "add",
            "operator.add",
            "",
            "quantized",
            ("conv",),
            entry="operator.add, ReLU",
            dtype_config="input quint8, output quint8",
            kernel="quantized.add_relu",
        ),
        Row("act", "Softplus", "act", "float", ("add",), rule="global", kernel="lookup(softplus)"),
        Row(
            "fc1",
            "Linear",
            "encoder.fc1",
            "float",
            rule='module_name "encoder"',
            reasons=(WHY, FURTHER),
        ),
        Row(
            "fc2",
            "Linear",
            "encoder.fc2",
            "float",
            rule='module_name "encoder"',
            multiply_adds=512,
            reasons=(replace(WHY, fix="another"), FURTHER),
        ),
    ),
    kernels=("quantized.conv2d_relu", "quantized.add_relu", "lookup(softplus)"),
    unlowered=(
        ReasonRow("no-kernel", "an integer kernel for add", "engine qnnpack has none", node="add"),
    ),
    unused_rules=('module_name "decodr.fc1"',),
    notes=('module_name "decodr.fc1" matches no module (did you mean "decoder.fc1"?)',),
    lowered=True,
    float_bytes=1_000_000,
    quantized_bytes=300_000,
)


def test_the_whole_text(snapshot: Callable[..., None]) -> None:
    snapshot("report", REPORT.render())
    assert str(REPORT) == REPORT.render()


def test_the_table_is_a_text_of_its_own(snapshot: Callable[..., None]) -> None:
    snapshot("table", REPORT.table())
    per_sample = replace(REPORT, samples=2).table()
    assert "110,592" in per_sample and "221,184" not in per_sample


def test_before_calibration(snapshot: Callable[..., None]) -> None:
    rows = tuple(replace(row, kernel="", observers=()) for row in REPORT.rows)
    plain = replace(
        REPORT, rows=rows, kernels=(), unlowered=(), engine="", float_bytes=0, lowered=False
    )
    snapshot("report-explained", plain.render())


def test_nothing_at_all() -> None:
    text = "model for x86, reference model: 0 of 0 operators quantized"
    assert Report("x86").render() == text


def test_a_narrow_terminal_folds_the_table_and_not_the_reasons() -> None:
    table = REPORT.table(width=60).splitlines()
    start = next(i for i, line in enumerate(table) if line.startswith("node"))
    assert all(len(line) <= 60 for line in table[start : start + 6])
    lines = REPORT.render(width=60).splitlines()
    assert (
        '  supported weight qint8 [-127, 127]   qnnpack, entry "Linear", dtype config 1 of 4'
        in lines
    )


def test_colour_is_asked_for() -> None:
    assert "\x1b[" in REPORT.render(color=True) and "\x1b[" not in REPORT.render()


def test_markup_in_names_is_text() -> None:
    rows = (
        Row(
            "[red]x[/]", "[bold]", "[/nothing]", "float", reasons=(ReasonRow("[/]", "[a]", "[b]"),)
        ),
    )
    report = Report("[x]", rows=rows, notes=("[/note]",))
    text = report.render() + report.table()
    assert "[red]x[/]" in text and "[/note]" in text and "requested [a]" in text


def test_the_first_line_says_whether_it_is_quantized() -> None:
    assert headline(Report("x86", rows=REPORT.rows[:1])) == (
        "model for x86, reference model: 100.0% of the multiply-adds planned to be on integers"
    )
    assert headline(REPORT) == "Encoder for qnnpack: 99.8% of the multiply-adds on integers"


def test_less_than_half_is_said_first() -> None:
    conv, fc = (Row(n, "Conv2d", n, "float", multiply_adds=k) for n, k in (("a", 90), ("b", 10)))
    report = Report("x86", "Net", lowered=True, rows=(conv, fc))
    assert headline(report) == "Net for x86 is in FLOAT: 0.0% of the multiply-adds on integers"
    part = replace(report, rows=(conv, replace(fc, outcome="quantized")))
    assert headline(part).startswith("Net for x86 is mostly FLOAT: 10.0%")
    assert not shortfall(replace(report, rows=(replace(conv, outcome="quantized"), fc)))
    none = ReasonRow("qconfig-none", "module_name 'a' is None: skip", "")
    by_user = replace(conv, rule="module_name 'a'", reasons=(none,))
    assert not shortfall(replace(report, rows=(by_user, replace(fc, outcome="quantized"))))


def test_the_first_screen_answers_in_80_columns() -> None:
    figures = Figures(28.44, "on the last calibration batch", 0.0666, 0.1393, 0.912, 0.915)
    report = replace(REPORT, figures=figures, samples=2, library="a library would be faster")
    first = report.render().split("\n\n")[0].splitlines()
    assert all(len(line) <= 80 for line in first)
    text = " ".join(" ".join(first).split())
    for words in (
        "accuracy SQNR 28.4 dB (higher is better) at the outputs",
        "metric 0.912 (float 0.915)",
        "speed 2.1× as fast (66.6 ms, float 139 ms)",
        "size 3.3× smaller (1.00 MB → 0.30 MB)",
        "work 110.8 k multiply-adds per sample; 2 of 5 operators quantized",
        "next a library would be faster",
    ):
        assert words in text


def test_arranging_values_is_no_operator() -> None:
    rows = (*REPORT.rows, Row("t", ".transpose()", "", "float", moves=True))
    report = replace(REPORT, rows=rows)
    assert "2 of 5 operators quantized" in report.render()
    assert "transpose" not in report.render() and "transpose" in report.table()


def test_bytes() -> None:
    assert [human_bytes(n) for n in (0, 99_949, 100_000, 25_600_000)] == [
        "0.0 kB",
        "99.9 kB",
        "0.10 MB",
        "25.60 MB",
    ]


def test_render_takes_what_rich_takes() -> None:
    assert render(Text("plain [text]")) == "plain [text]"
    assert "head" in render(Table("head"))


def test_few_unreached_entries_are_named() -> None:
    few = Report("mine", unreached_entries=("Linear", "Conv2d, ReLU")).render()
    assert 'entry "Conv2d, ReLU": no operator reaches it' in few
    assert "reaches" not in Report("x86", unreached_entries=("Linear",) * 9).render()


FREE = ReasonRow("no-entry", "an operator, quantized", "x86 has no entry for it")


def _many() -> Report:
    """A model of one kind of layer that multiplies and of five that do not."""
    attention = [
        Row(
            f"attn_{i}", "Attention", f"layers.{i}.attn", "float", multiply_adds=30, reasons=(FREE,)
        )
        for i in range(8)
    ]
    kinds = ["add", "norm", "cat", "pad", "roll"]
    free = [
        Row(f"{kind}_{i}", kind, f"layers.{i}", "float", reasons=(replace(FREE, asked=kind),))
        for kind in kinds
        for i in range(4)
    ]
    computed = Row("fc", "F.linear", "head", "unlowered", multiply_adds=10, reasons=(WHY,))
    done = Row("conv", "Conv2d", "conv", "quantized", kernel="qconv", multiply_adds=750)
    size = Row("eq", "operator.eq", "", "not_tensor")
    return Report("x86", rows=(*attention, *free, computed, done, size), lowered=True)


def test_the_first_screen_says_what_matters(snapshot: Callable[..., None]) -> None:
    text = _many().render()
    snapshot("report-many", text)
    first = text.splitlines()
    assert first[0].startswith("model for x86: 75.0% of the multiply-adds on integers")
    rows = [line.split("   ") for line in (first[8], first[9].strip())]
    assert rows[0] == ["24.0%", "layers.*.attn (8 operators)", "Attention: no-entry"]
    assert rows[1][:2] == ["1.0%", "head"] and rows[1][-1].strip() == "F.linear: weight-range"
    assert "operator.eq" not in text


def test_equal_reasons_are_one_paragraph() -> None:
    text = _many().render()
    assert text.count("stay float") == 3  # the summary, attention, and all without multiply-adds
    assert "20 operators without multiply-adds  stay float" in text


def test_rules_that_leave_out_one_operator_each_are_one_reason() -> None:
    rows = []
    for i in range(5):
        rule = f"module_name_object_type_order layers.{i} operator.add [0]"
        why = ReasonRow("qconfig-none", f"{rule} is None: skip", "")
        rows.append(
            Row(f"add_{i}", "operator.add", f"layers.{i}", "float", rule=rule, reasons=(why,))
        )
    text = Report("x86", rows=tuple(rows)).render()
    assert text.count("qconfig-none") == 1
    assert "requested module_name_object_type_order layers.* operator.add [0] is None: skip" in text


def test_an_unknown_share_is_said_to_be_unknown() -> None:
    custom = Row(
        "c", "deform_conv2d", "", "float", multiply_adds=5, uncounted=("tv.deform_conv2d",)
    )
    report = Report("x86", rows=(*_many().rows, custom), lowered=True)
    text = report.render()
    assert "at most 74.6% of the multiply-adds on integers (one operator is not counted)" in text
    assert "?   c " in text and "5 + ?" in report.table()
    assert "an unknown share" in Report("x86", not_counted="no example inputs").render()


def test_what_is_computed_once_is_said() -> None:
    assert (
        "12 multiply-adds of the model are not in its graph"
        in Report("x86", computed_once=12).render()
    )


def test_float16_is_not_called_an_integer() -> None:
    row = Row(
        "fc", "Linear", "fc", "quantized", dtype_config="weight float16, dynamic", multiply_adds=1
    )
    assert "of the multiply-adds on quantized kernels" in headline(
        Report("x86", rows=(row,), lowered=True)
    )
