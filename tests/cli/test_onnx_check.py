from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

Run = Callable[..., Any]


@pytest.fixture
def write(here: Path) -> Callable[..., None]:
    def written(zero_point: int, *, operator: str = "Relu") -> None:
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "quantize"),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "back"),
            helper.make_node(operator, ["d"], ["y"], "last"),
        ]
        values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in "xy"]
        constants = [
            helper.make_tensor("s", TensorProto.FLOAT, [], [0.1]),
            helper.make_tensor("z", TensorProto.INT8, [], [zero_point]),
        ]
        graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
        onnx.save(helper.make_model(graph), here / "m.onnx")

    return written


def test_errors_are_printed_with_their_source(run: Run, write) -> None:
    write(7)
    shown = run("check", "m.onnx", "--for", "tensorrt")
    assert shown.status == 1
    assert "quantize: the zero point is not 0 (expected 0, found 7)" in shown.out
    assert "https://docs.nvidia.com/deeplearning/tensorrt/" in shown.out
    assert "m.onnx, for tensorrt: 2 errors, 0 advice" in shown.out


def test_json(run: Run, write) -> None:
    write(7)
    data = run("check", "m.onnx", "--for", "tensorrt", "--json").data
    assert (data["error"], data["advice"], len(data["findings"])) == (2, 0, 2)
    assert set(data["findings"][0]) >= {"rule", "node", "expected", "found", "citation"}


def test_clean_file(run: Run, write) -> None:
    write(0)
    shown = run("check", "m.onnx", "--for", "tensorrt")
    assert shown.status == 0 and shown.out == "m.onnx, for tensorrt: 0 errors, 0 advice\n"


def test_advice_alone_is_no_failure(run: Run, write) -> None:
    write(0, operator="GlobalAveragePool")
    shown = run("check", "m.onnx", "--for", "tensorrt")
    assert shown.status == 0 and "pool-quantized" in shown.out and "1 advice" in shown.out


def test_target_must_be_named_and_known(run: Run, write) -> None:
    write(0)
    for words in (["m.onnx"], ["m.onnx", "--for", "tensort"]):
        shown = run("check", *words)
        assert shown.status == 2 and "--for tensorrt" in shown.err


def test_broken_and_missing_files(run: Run, here: Path) -> None:
    (here / "m.onnx").write_bytes(b"\x08\x07" * 9)
    assert run("check", "m.onnx", "--for", "tensorrt").status == 2
    assert "there is no file" in run("check", "none.onnx", "--for", "tensorrt").err
