"""Descriptions with one mistake each: ``check`` says file, line, field and why, ``quantize`` refuses before
anything is measured, and the file in which the printed fix is made passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Result

SPEC = """\
schema_version: 1
name: npu
dtype_configs:
  int8:
    input_dtype: qint8
    output_dtype: qint8
    weight_dtype: {dtype: qint8}
    bias_dtype: float32
entries:
- operators: [conv2d, linear]
  dtype_configs: [int8]
"""
WEIGHT, BIAS, OPERATORS = "{dtype: qint8}", "bias_dtype: float32", "  dtype_configs: [int8]"


@dataclass(frozen=True)
class Mistake:
    """``wrong`` in place of ``part`` of the file, and ``right`` in its place, as the printed fix says."""

    part: str
    wrong: str
    right: str
    line: int
    field: str

    @property
    def text(self) -> str:
        return SPEC.replace(self.part, self.wrong)

    @property
    def mended(self) -> str:
        return SPEC.replace(self.part, self.right)


def weight(wrong: str, right: str, field: str = "") -> Mistake:
    at = f"dtype_configs.int8.weight_dtype{field}"
    return Mistake(WEIGHT, f"{{dtype: qint8, {wrong}}}", f"{{dtype: qint8, {right}}}", 7, at)


def config(wrong: str, right: str, line: int, field: str) -> Mistake:
    at = f"dtype_configs.int8{field}"
    return Mistake(BIAS, f"{BIAS}\n    {wrong}", f"{BIAS}\n    {right}", line, at)


def condition(wrong: str, right: str, field: str = "") -> Mistake:
    before = f"{OPERATORS}\n  where: "
    return Mistake(OPERATORS, before + wrong, before + right, 12, f"entries[0].where{field}")


MISTAKES = {
    # names that are not there
    "attribute": condition("{in_chanels: {max: 64}}", "{in_channels: {max: 64}}", ".in_chanels"),
    "attribute-of-a-config": config(
        "where: {in_chanels: 8}", "where: {in_channels: 8}", 9, ".where.in_chanels"
    ),
    "tensor": condition("{inpt.rank: 4}", "{input.rank: 4}", ".inpt.rank"),
    "keyword": condition("{batch: {maximum: 7}}", "{batch: {max: 7}}", ".batch.maximum"),
    "field": weight("scals: [1]", "scales: [1]", ".scals"),
    "dtype": Mistake(WEIGHT, "qint9", "qint8", 7, "dtype_configs.int8.weight_dtype"),
    "operator": Mistake(
        "[conv2d, linear]", "[conv2, linear]", "[conv2d, linear]", 10, "entries[0].operators[0]"
    ),
    "named-config": Mistake("[int8]", "[int9]", "[int8]", 11, "entries[0].dtype_configs[0]"),
    "rounding": config("rounding: half_upp", "rounding: half_up", 9, ".rounding"),
    "engine": Mistake("name: npu", "name: npu\nengine: x68", "name: npu\nengine: x86", 3, "engine"),
    # groups
    "group-of-a-condition": Mistake(
        f"{WEIGHT}\n    {BIAS}\nentries:\n- operators: [conv2d, linear]\n{OPERATORS}",
        "{dtype: int4, granularity: per_group(size=100)}\nentries:\n- operators: [linear]\n"
        f"{OPERATORS}\n  where: {{in_channels: 64}}",
        "{dtype: int4, granularity: per_group(size=64)}\nentries:\n- operators: [linear]\n"
        f"{OPERATORS}\n  where: {{in_channels: 64}}",
        7,
        "dtype_configs.int8.weight_dtype.granularity",
    ),
    "granularity": weight("granularity: per_chanel", "granularity: per_channel", ""),
    "tokens-of-a-weight": weight(
        "granularity: per_token", "granularity: per_channel", ".granularity"
    ),
    "groups-of-a-static-input": Mistake(
        "input_dtype: qint8",
        "input_dtype: {dtype: qint8, granularity: per_group(size=4)}",
        "input_dtype: {dtype: qint8, granularity: per_tensor}",
        5,
        "dtype_configs.int8.input_dtype.granularity",
    ),
    # sets and ranges of scales
    "no-scales": weight("scales: []", "scales: [2**-8, 2**-4, 1]", ".scales"),
    "no-scale-is-left": weight(
        "scales: [0.5, 1], scale_range: [2**-12, 2**-4]", "scales: [0.5, 1]", ".scales"
    ),
    "no-power-of-two": weight(
        "scales: [0.3, 0.6], power_of_two_scale: true", "scales: [0.3, 0.6]", ".scales"
    ),
    "range": weight("scale_range: [1, 0.5]", "scale_range: [2**-16, 1]", ".scale_range"),
    # contradictions
    "bounds": weight(
        "quant_min_lower_bound: 9, quant_max_upper_bound: -9",
        "quant_min_lower_bound: -9, quant_max_upper_bound: 9",
    ),
    "one-value": weight(
        "quant_min_lower_bound: 3, quant_max_upper_bound: 3",
        "quant_min_lower_bound: -3, quant_max_upper_bound: 3",
    ),
    "fixed-and-set": weight(
        "scale_exact_match: 1, zero_point_exact_match: 0, scales: [2]",
        "scale_exact_match: 1, zero_point_exact_match: 0",
    ),
    "zero-point": weight("zero_point_exact_match: 300", "zero_point_exact_match: 0"),
    "bias-scale": Mistake(
        BIAS,
        f"{BIAS}\n    bias_scale: input_times_weight",
        "bias_dtype: int32\n    bias_scale: input_times_weight",
        9,
        "dtype_configs.int8.bias_scale",
    ),
    "integer-bias": Mistake(
        BIAS,
        "bias_dtype: int32",
        "bias_dtype: int32\n    bias_scale: input_times_weight",
        8,
        "dtype_configs.int8.bias_dtype",
    ),
    "dynamic": Mistake(
        "output_dtype: qint8",
        "output_dtype: qint8\n    is_dynamic: true",
        "output_dtype: float32\n    is_dynamic: true",
        6,
        "dtype_configs.int8.output_dtype",
    ),
    "shift": config(
        "requantization: shift",
        "requantization: shift\n    requantization_ratio: power_of_two",
        9,
        ".requantization",
    ),
    "condition": condition("{in_channels: {min: 16, max: 8}}", "{in_channels: {min: 3, max: 8}}"),
    "conditions": condition(
        "{batch: {max: 8}, all: [{batch: {min: 9}}]}", "{batch: {max: 8}, all: [{batch: 1}]}"
    ),
    # what nothing satisfies
    "no-observer": Mistake(
        WEIGHT, "float8_e4m3fnuz", "float8_e4m3fn", 7, "dtype_configs.int8.weight_dtype"
    ),
    "packed-activation": Mistake(
        "input_dtype: qint8",
        "input_dtype: float4_e2m1fn_x2",
        "input_dtype: qint8",
        5,
        "dtype_configs.int8.input_dtype",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(
    name: str, run: Callable[..., Result], here: Path, snapshot: Callable[..., None]
) -> None:
    mistake, file = MISTAKES[name], here / "npu.yaml"
    file.write_text(mistake.text)
    checked = run("check", "npu.yaml")
    assert checked.status == 1 and checked.err == ""
    assert f"error: npu.yaml:{mistake.line}: {mistake.field}" in checked.out
    asked = ("zoo:with_inputs", "--backend", "npu.yaml", "-o", "npu.bq")
    quantized = run("quantize", *asked, "--data", "zoo:BATCHES")
    assert quantized.status == 2 and not (here / "npu.bq").exists()
    assert "calibrating" not in quantized.err
    assert f"npu.yaml:{mistake.line}: {mistake.field}" in quantized.err
    snapshot(name, f"{checked.out}\n{quantized.err}")
    file.write_text(mistake.mended)
    mended = run("check", "npu.yaml")
    assert mended.status == 0, mended.out


def _mended(_: str, names: dict[str, Any]) -> None:
    """The file in which the printed fix is made: ``check`` passes."""
    Path("npu.yaml").write_text(MISTAKES[names["name"]].mended)
    assert names["run"]("check", "npu.yaml").status == 0


BY_HAND = {
    "": _mended,
}
