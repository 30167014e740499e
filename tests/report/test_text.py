from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from backquant.report.model import ObserverRow, ReasonRow, Report, Row
from backquant.report.text import human_bytes, render, render_text, summary

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
    engine="qnnpack (avx2, torch 2.13.0)",
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
    float_bytes=1_000_000,
    quantized_bytes=300_000,
)


def test_the_whole_text(snapshot: Callable[..., None]) -> None:
    snapshot("report", render_text(REPORT))
    assert str(REPORT) == REPORT.render() == render_text(REPORT)


def test_before_calibration(snapshot: Callable[..., None]) -> None:
    rows = tuple(replace(row, kernel="", observers=()) for row in REPORT.rows)
    plain = replace(REPORT, rows=rows, kernels=(), unlowered=(), engine="", float_bytes=0)
    snapshot("report-explained", render_text(plain))


def test_nothing_at_all() -> None:
    assert render_text(Report("x86")) == "x86, as a reference model: 0 of 0 operators quantized"


def test_a_narrow_terminal_folds_the_table_and_not_the_reasons() -> None:
    lines = render_text(REPORT, width=60).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("node"))
    assert all(len(line) <= 60 for line in lines[start : start + 6])
    assert (
        '  admitted  weight qint8 [-127, 127]   qnnpack, entry "Linear", dtype config 1 of 4'
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
    text = render_text(Report("[x]", rows=rows, notes=("[/note]",)))
    assert "[red]x[/]" in text and "[/note]" in text and "asked     [a]" in text


def test_summary_counts() -> None:
    assert summary(Report("x86", rows=REPORT.rows[:1])).startswith(
        "x86, as a reference model: 1 of 1"
    )
    assert "2 stay float" in summary(REPORT) and "1 more run on integers" in summary(REPORT)


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
    few = render_text(Report("mine", unreached_entries=("Linear", "Conv2d, ReLU")))
    assert 'entry "Conv2d, ReLU": no operator reaches it' in few
    assert "reaches" not in render_text(Report("x86", unreached_entries=("Linear",) * 9))
