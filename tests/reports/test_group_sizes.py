"""Group sizes that do not divide the rows of a weight: what is printed is followed (torchchat#1362)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import backquant
import backquant.observe
from backquant import CoverageError, QConfig, UsageError

BACKENDS = ["x86_lowbit", "gguf", "mlx", "gptq", "awq", "compressed_tensors", "x86"]
BACKENDS += ["onnxruntime", "openvino", "xnnpack", "inductor_x86", "executorch"]
WIDTHS = [96, 100, 288, 4304]
_EXPLAIN = "print(backquant.explain("


def layers(*widths: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(one, two) for one, two in itertools.pairwise(widths)))


def followed(fix: str, asked: dict[str, Any]) -> dict[str, Any]:
    """``asked`` as the first line of a fix says it is to be."""
    line, changed = fix.splitlines()[0], dict(asked)
    if line.endswith(", without group_size"):
        changed["group_size"] = None
        line = line.removesuffix(", without group_size")
    assert re.fullmatch(r"(\w+=('\w+'|\d+))(, \w+=('\w+'|\d+))*", line), fix
    return {**changed, **eval(f"dict({line})", {})}


def quantized(model: nn.Module, width: int, asked: dict[str, Any]) -> backquant.QuantizedModel:
    made = backquant.quantize(model, torch.randn(1, width), **asked)
    assert made.report.quantized
    return made


def _with_rule(model: nn.Module, width: int, fix: str, asked: dict[str, Any]) -> None:
    """Add the rule that a fix prints to the mapping that the call stands for."""
    rest = {key: value for key, value in asked.items() if key not in ("weights", "group_size")}
    mapping = backquant.weight_only_mapping(rest["backend"], asked["weights"], asked["group_size"])
    names = {name: getattr(backquant.observe, name) for name in backquant.observe.__all__}
    code = fix.partition(f"\n{_EXPLAIN}")[0]
    exec(code, {**names, "QConfig": QConfig, "torch": torch, "qconfig_mapping": mapping})
    quantized(model, width, {**rest, "qconfig_mapping": mapping})


def tried(widths: Sequence[int], asked: dict[str, Any]) -> str:
    """The fix that was followed; empty where none is printed, or none is needed. A ``UsageError`` is about
    the request alone: what it says to ask of another backend may have to be said of this model, too."""
    model = layers(*widths)
    try:
        quantized(model, widths[0], asked)
    except (CoverageError, UsageError) as error:
        fix = error.fix or ""
        if fix.startswith((_EXPLAIN, "in_", "out_", "an entry")) or not fix:
            return ""  # nothing about the size
        if fix.startswith("qconfig_mapping."):
            _with_rule(model, widths[0], fix, asked)
            return fix
        again = followed(fix, asked)
        if isinstance(error, UsageError):
            assert again.keys() == asked.keys()
            tried(widths, again)
        else:
            quantized(model, widths[0], again)
        return fix
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_printed_size_is_taken(backend: str) -> None:
    for width in WIDTHS:
        for size in (128, 48):
            for weights in ("int4", "int8"):
                tried([width, 32], {"backend": backend, "weights": weights, "group_size": size})


def test_there_is_a_fix_where_there_is_a_size() -> None:
    for width, size in ((96, 32), (288, 32), (576, 64), (48, None)):
        fix = tried([width, 32], {"backend": "x86_lowbit", "weights": "int4", "group_size": 128})
        assert fix.startswith(f"group_size={size}") if size else not fix.startswith("group_size")


def test_blocks_of_several_widths() -> None:
    """The head of 288 inputs, of a model whose other layers take groups of 128."""
    model = layers(256, 288, 32)
    asked = {"backend": "x86_lowbit", "weights": "int4", "group_size": 128}
    made = quantized(model, 256, asked)
    [row] = [row for row in made.report.rows if not row.quantized]
    fix = row.reasons[0].fix
    assert fix.startswith("group_size=")
    again = quantized(model, 256, {**asked, **eval(f"dict({fix})", {})})
    assert {row.node for row in again.report.quantized} >= {row.node}


def test_groups_by_path() -> None:
    model = layers(256, 288, 32)
    made = quantized(model, 256, {"weights": {"0": "int4:128", "1": "int4:32"}})
    assert len(made.report.quantized) == 2


def test_a_coverage_that_is_required() -> None:
    asked = {"backend": "x86_lowbit", "weights": "int4", "group_size": 128, "require": ["0"]}
    assert tried([288, 32], asked).startswith("group_size=32")


@pytest.mark.parametrize(
    "weights",
    ["int4:0", "int4:half", {"up": "int4"}, {0: "int4"}, ["int4"], {"1": "int4:1"}, torch.int8],
    ids=str,
)
def test_wishes_that_cannot_be_are_refused_with_one_that_can(
    weights: Any, snapshot: Callable[..., None]
) -> None:
    with pytest.raises(UsageError) as refused:
        backquant.quantize(
            layers(128, 128, 128), torch.randn(1, 128), backend="x86_lowbit", weights=weights
        )
    snapshot(str(weights).replace(" ", ""), refused.value)


def test_a_group_size_behind_a_colon_is_as_on_the_command_line() -> None:
    model, x = layers(64, 64), torch.randn(2, 64)
    asked = {"weights": "int4", "group_size": 32}
    one, other = (
        backquant.quantize(model, x, backend="x86_lowbit", **each)
        for each in (asked, {"weights": "int4:32"})
    )
    assert torch.equal(one(x), other(x))
