from __future__ import annotations

import json
from dataclasses import replace

import pytest

from backquant.report.model import ObserverRow, ReasonRow, Report, Row

REASON = ReasonRow(
    "weight-range", "weight int8 [-128, 127]", "weight int8 [-127, 127]", "fix()", "x86", "fc"
)
OBSERVERS = (
    ObserverRow("input", "x", "quint8", 0, 127, 0.25, 3),
    ObserverRow("weight", "weight", "qint8", -128, 127, detail="8 scales on axis 0 (0.1 … 0.2)"),
    ObserverRow("output", "conv", "quint8", 0, 255, 1e-3, 0, shared_with=("pool", "cat")),
)
REPORT = Report(
    "qnnpack",
    model="Net",
    engine="qnnpack (avx2)",
    rows=(
        Row(
            "conv",
            "Conv2d",
            "conv",
            "quantized",
            multiply_adds=100,
            observers=OBSERVERS,
            fused=("conv", "bn"),
        ),
        Row(
            "fc",
            "Linear",
            "fc",
            "float",
            ("conv",),
            rule="global",
            multiply_adds=300,
            reasons=(REASON,),
        ),
        Row("act", "Softplus", "", "float", ("fc",), kernel="lookup(softplus)"),
        Row("size", ".size()", "", "not_tensor"),
    ),
    unused_rules=("module_name x",),
    kernels=("conv", "lookup(softplus)"),
    unlowered=(REASON,),
    float_bytes=1_000_000,
    quantized_bytes=300_000,
    extras={"cards": [{"title": "accuracy", "value": "99%"}]},
)


def test_round_trip_through_json() -> None:
    assert Report.from_dict(json.loads(json.dumps(REPORT.to_dict(), allow_nan=False))) == REPORT


def test_coverage_counts_multiply_adds_and_without_them_operators() -> None:
    assert REPORT.coverage == 0.25
    assert len(REPORT.operators) == 3
    plain = Report("x86", rows=(Row("a", "add", "", "quantized"), Row("b", "mul", "", "float")))
    assert plain.coverage == 0.5
    assert Report("x86").coverage == 0.0


def test_what_the_plan_left_in_float_may_run_on_integers() -> None:
    assert [row.node for row in REPORT.float_rows] == ["fc"]
    assert [row.node for row in REPORT.on_integers] == ["act"]
    assert [row.state for row in REPORT.rows] == ["quantized", "float", "integers", "not_tensor"]


def test_names_and_outputs_of_rows() -> None:
    assert [row.name for row in REPORT.rows] == ["conv", "fc", "act", "size"]
    assert REPORT.rows[0].output is OBSERVERS[2] and REPORT.rows[1].output is None


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (OBSERVERS[0], "input x: quint8 [0, 127], scale 0.25, zero point 3"),
        (OBSERVERS[1], "weight weight: qint8 [-128, 127], 8 scales on axis 0 (0.1 … 0.2)"),
        (
            OBSERVERS[2],
            "output conv: quint8 [0, 255], scale 0.001, zero point 0, shared with pool, cat",
        ),
        (ObserverRow("input", "x"), "input x"),
        (ObserverRow("input", "x", shared_with=("y",)), "input x: shared with y"),
        (ObserverRow("input", "x", "float16"), "input x: float16"),
    ],
)
def test_observers_in_a_line(row: ObserverRow, text: str) -> None:
    assert str(row) == text


def test_observers_in_short() -> None:
    assert [row.short for row in OBSERVERS] == [
        "0.25 zero 3 [0, 127]",
        "8 scales on axis 0 (0.1 … 0.2)",
        "0.001 zero 0 [0, 255] = pool +1",
    ]
    assert replace(OBSERVERS[0], zero_point=None, shared_with=("a",)).short == "0.25 [0, 127] = a"
