from __future__ import annotations

import json

from backquant.report.model import ReasonRow, Report, Row

REASON = ReasonRow("weight-range", "weight int8 [-128, 127]", "weight int8 [-127, 127]", "fix()", "x86")
REPORT = Report(
    "qnnpack",
    engine="qnnpack (avx2)",
    rows=(
        Row("conv", "Conv2d", "conv", "quantized", multiply_adds=100, observers=("output MinMax",)),
        Row("fc", "Linear", "fc", "float", ("conv",), rule="global", multiply_adds=300, reasons=(REASON,)),
        Row("size", ".size()", "", "not_tensor"),
    ),
    unused_rules=("module_name x",),
    float_bytes=1_000_000,
    quantized_bytes=300_000,
)


def test_round_trip_through_json() -> None:
    assert Report.from_dict(json.loads(json.dumps(REPORT.to_dict()))) == REPORT


def test_coverage_counts_multiply_adds_and_without_them_operators() -> None:
    assert REPORT.coverage == 0.25
    assert len(REPORT.operators) == 2
    plain = Report("x86", rows=(Row("a", "add", "", "quantized"), Row("b", "mul", "", "float")))
    assert plain.coverage == 0.5
    assert Report("x86").coverage == 0.0


def test_text_names_the_refusal_with_its_fix() -> None:
    text = REPORT.render(width=100)
    assert "1 of 2 operators quantized, 25.0% of the multiply-adds, 1.00 MB → 300.00 kB" not in text
    assert "1 of 2 operators quantized, 25.0% of the multiply-adds" in text
    assert "fc  Linear  stays float" in text
    assert "admitted  weight int8 [-127, 127]   x86" in text
    assert "fix       fix()" in text
    assert "unused: module_name x" in text
