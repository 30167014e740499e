"""Descriptions whose engine is not here: their plan is tried, and the rules of files written for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import backquant
from backquant.backend_config import BackendConfig
from backquant.conformance import ConformanceVerdict as Verdict
from backquant.conformance.engines import Rules, written_for
from backquant.conformance.results import Outcome, Side, Tally

NPU = """schema_version: 1
name: my_npu
entries:
- operators: [conv2d]
  where: {kernel_height: {max: 3}}
  dtype_configs:
  - {input_dtype: quint8, output_dtype: quint8, weight_dtype: {dtype: qint8, quant_min_lower_bound: -127}}
"""


def tried(backend: Any, *entries: str, engine: Any = None) -> Any:
    return backquant.conform(backend, entries=entries, engine=engine, rounds=1, jobs=0)


@pytest.fixture
def npu(tmp_path: Path) -> BackendConfig:
    path = tmp_path / "my_npu.yaml"
    path.write_text(NPU, encoding="utf-8")
    return BackendConfig.load(path)


def test_tensorrt_is_tried_by_its_rules() -> None:
    """What it is said to compute, and by which kernel of the integer reference it would be compared."""
    found = tried("tensorrt", "nn.ReLU(torch.nn.Conv2d)", "nn.PixelShuffle", "torch.nn.Linear")
    assert found.engine == "tensorrt" and found.conforms and not found.computed
    untried = [each for each in found.outcomes if each.verdict is Verdict.UNTRIED]
    assert {each.side for each in untried} == {Side.ACCEPTED}
    [one] = (each for each in untried if each.pattern == "torch.nn.ReLU(torch.nn.Conv2d)")
    assert "by its rules it computes Conv (int8), Relu (int8)" in one.detail
    assert "the integer reference computes it (integer.conv2d" in one.detail
    [moved] = (each for each in untried if each.pattern == "torch.nn.PixelShuffle")
    assert "DepthToSpace (int8)" in moved.detail
    assert found.counts[Verdict.CONFORMS] >= 6, (
        "refusals, each for the dtype or scheme that is named"
    )


def test_a_zero_point_breaks_its_rules() -> None:
    """Without `symmetric` the description claims files that TensorRT refuses."""
    backend = backquant.get_backend_config("tensorrt")
    for entry in backend.configs:
        entry.set_dtype_configs(
            [
                {
                    **config.to_dict(),
                    **{f"{role}_dtype": torch.qint8 for role in ("input", "output")},
                }
                for config in entry.dtype_configs
            ]
        )
    found = tried(backend, "torch.nn.MaxPool2d")
    assert not found.conforms
    [refused] = found.failures
    assert refused.verdict is Verdict.REFUSED_BY_ENGINE and "zero point is not 0" in refused.detail


def test_a_description_without_an_engine(npu: BackendConfig) -> None:
    """Bounds are tried on the refused side; that the integer reference computes is no proof of a chip."""
    found = tried(npu)
    assert (found.engine, found.conforms, found.computed) == ("none", True, False)
    assert found.counts[Verdict.CONFORMS] >= 4
    details = {each.detail for each in found.outcomes if each.verdict is Verdict.UNTRIED}
    assert "no engine of it is here; the integer reference computes it (integer.conv2d)" in details
    assert "nothing was computed" in str(found)


def test_a_bound_that_is_not_enforced_fails_without_an_engine(
    npu: BackendConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backquant.match import constraints

    rules = tuple(rule for rule in constraints.RULES if rule is not constraints.range_within)
    monkeypatch.setattr(constraints, "RULES", rules)
    assert tried(npu).counts[Verdict.UNPREDICTABLE]


def test_what_the_integer_reference_lacks_is_computed_in_float() -> None:
    found = tried("tensorrt_fp8", "torch.nn.Linear")
    details = [each.detail for each in found.outcomes if each.pattern == "torch.nn.Linear"]
    assert found.conforms and all(
        "Gemm (float8)" in each or "MatMul (float8)" in each for each in details
    )
    assert all("its reference model computes it, in float" in each for each in details)


def test_targets_that_only_write() -> None:
    found = written_for("tensorrt_fp8")
    assert found is not None and found.name == "tensorrt"
    assert written_for("xnnpack") is None, "it runs here"
    assert Rules().versions().keys() == {"backquant", "python", "torch"}


def test_the_reason_of_a_claim_is_that_of_its_verdict() -> None:
    """Not that of a lesser one that came first."""
    tally = Tally("torch.add", "int8")
    blank = Outcome("a case", "torch.add", "int8", Side.REFUSED, "x86", Verdict.UNTRIED)
    tally.add(replace(blank, detail="no use was found"))
    tally.add(
        replace(blank, verdict=Verdict.TOO_NARROW, detail="the engine computes it", elements=4)
    )
    assert (tally.verdict, tally.why) == (Verdict.TOO_NARROW, "the engine computes it")
    tally.add(replace(blank, verdict=Verdict.WRONG, steps=3.0, limit=1.0, elements=4))
    assert (tally.verdict, tally.why) == (Verdict.WRONG, "3 steps off, 1 are stated")
