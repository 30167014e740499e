from __future__ import annotations

from typing import Any

import pytest

from backquant.errors import CoverageError, UsageError
from backquant.report.model import ReasonRow, Report, Row, check_requirement, given_requirement

WHY = ReasonRow("range", "int16", "int8", "the_fix()")
REPORT = Report(
    "x86",
    rows=(
        Row(
            "enc_fc1",
            "Linear",
            "enc.fc1",
            "quantized",
            fused=("enc.fc1", "enc.bn"),
            multiply_adds=60,
        ),
        Row("enc_fc2", "Linear", "enc.fc2", "float", multiply_adds=40, reasons=(WHY,)),
        Row("encoder_fc", "Linear", "encoder.fc", "quantized"),
        Row("add", "operator.add", "", "float", reasons=(WHY,)),
        Row("size", ".size()", "size", "not_tensor"),
    ),
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (0, 0.0),
        (1, 1.0),
        (0.25, 0.25),
        ("fc", ("fc",)),
        (["a", "b"], ("a", "b")),
        ((), ()),
        ({"a": 1}.keys(), ("a",)),
    ],
)
def test_requirements_that_can_be_meant(given: Any, expected: Any) -> None:
    assert given_requirement(given) == expected


@pytest.mark.parametrize("given", [True, -0.1, 1.1, 90, float("nan"), [1], object(), b"fc"])
def test_requirements_that_cannot(given: Any) -> None:
    with pytest.raises(UsageError):
        given_requirement(given)


def test_shares() -> None:
    check_requirement(REPORT, 0.6)
    check_requirement(REPORT, None)
    with pytest.raises(
        CoverageError, match=r"60\.0% of the multiply-adds .* and 61\.0% is required"
    ) as caught:
        check_requirement(REPORT, 0.61)
    operators = "enc.fc2 (Linear), add (operator.add), 40.0% of the multiply-adds"
    assert caught.value.where == f"{operators}: range, requested int16, supported int8"
    assert caught.value.fix.startswith("the_fix()\n")


@pytest.mark.parametrize(
    "names", [("enc.fc1",), ("enc.bn",), ("encoder",), ("enc.fc1", "encoder.fc"), ()]
)
def test_modules_that_are_quantized(names: tuple[str, ...]) -> None:
    check_requirement(REPORT, names)


@pytest.mark.parametrize("names", [("enc",), ("enc.fc2",), ("encoder", "enc.fc2")])
def test_modules_that_are_not(names: tuple[str, ...]) -> None:
    with pytest.raises(CoverageError, match="is required to be quantized"):
        check_requirement(REPORT, names)


@pytest.mark.parametrize("name", ["enc.fc", "en", "size", "fc2"])
def test_names_of_no_module_with_operators(name: str) -> None:
    with pytest.raises(UsageError, match="no operator of the model is in a module"):
        check_requirement(REPORT, (name,))


def test_nothing_quantized_is_never_enough() -> None:
    nothing = Report("x86", rows=REPORT.rows[1:2])
    for require in (None, 0.0, ()):
        with pytest.raises(CoverageError, match="nothing in this model can be quantized"):
            check_requirement(nothing, require)


def test_a_share_that_is_not_known_is_not_enough(snapshot: Any) -> None:
    custom = Row("c", "deform_conv2d", "", "float", uncounted=("torchvision.deform_conv2d",))
    report = Report("x86", rows=(*REPORT.rows[:1], custom))
    check_requirement(report, None)
    check_requirement(report, 0.0)
    check_requirement(report, ("enc.fc1",))
    with pytest.raises(CoverageError) as caught:
        check_requirement(report, 0.1)
    snapshot("require-uncounted", caught.value)
    with pytest.raises(CoverageError, match="is not known"):
        check_requirement(Report("x86", rows=REPORT.rows, not_counted="no examples"), 0.1)


def test_what_no_kernel_runs_is_not_done() -> None:
    unlowered = Row("fc", "F.linear", "", "unlowered", multiply_adds=90, reasons=(WHY,))
    kernel = Row("conv", "Conv2d", "conv", "quantized", kernel="qconv", multiply_adds=10)
    report = Report("x86", rows=(unlowered, kernel), lowered=True)
    with pytest.raises(CoverageError, match=r"10\.0% of the multiply-adds run on integers"):
        check_requirement(report, 0.11)


def test_many_operators_of_one_form_are_one() -> None:
    rows = [Row(f"fc{i}", "Linear", f"layers.{i}.fc", "float", reasons=(WHY,)) for i in range(9)]
    with pytest.raises(CoverageError) as caught:
        check_requirement(Report("x86", rows=tuple(rows)), None)
    assert (
        caught.value.where
        == "layers.*.fc (Linear) (9 operators): range, requested int16, supported int8"
    )
