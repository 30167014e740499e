"""``check_onnx`` on files: external data, broken files, subgraphs, large graphs."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from backquant.deploy.tensorrt import check_onnx
from backquant.errors import ExportError, MissingExtraError, UsageError


def test_file_and_model_say_the_same(clean, tmp_path) -> None:
    edit = clean()
    edit.constant("x_scale", -1.0)
    onnx.save(edit.model, tmp_path / "m.onnx")
    assert check_onnx(tmp_path / "m.onnx") == check_onnx(edit.model) != []
    assert check_onnx(str(tmp_path / "m.onnx")) == check_onnx(edit.model)


def test_external_data(clean, tmp_path) -> None:
    edit = clean()
    edit.constant("w1_scale", [0.1, -0.1, 0.1, 0.1])
    path = tmp_path / "m.onnx"
    onnx.save(edit.model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert [finding.rule for finding in check_onnx(path)] == ["scale-positive"]
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ExportError, match="cannot be read"):
        check_onnx(path)


@pytest.mark.parametrize("outside", ["../secret.bin", "ABSOLUTE", "link.bin"])
def test_external_data_lies_beside_the_file(outside: str, clean, tmp_path) -> None:
    """No path, and no link, leads to a file of another folder, whose numbers findings would print."""
    edit = clean()
    edit.constant("w1_scale", [0.1, -0.1, 0.1, 0.1])
    place = tmp_path / "model"
    place.mkdir()
    path, secret = place / "m.onnx", tmp_path / "secret.bin"
    onnx.save(edit.model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (place / "w.bin").rename(secret)
    (place / "link.bin").symlink_to(secret)
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = str(secret) if outside == "ABSOLUTE" else outside
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match="cannot be read"):
        check_onnx(path)


def test_weights_are_not_read(clean, tmp_path) -> None:
    """Only scales and zero points are; here the weights lie in a file that is not there."""
    edit = clean()
    for tensor in edit.graph.initializer:
        if tensor.name in ("w1", "w2", "w3"):
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="gone.bin")
    onnx.save(edit.model, tmp_path / "m.onnx")
    assert check_onnx(tmp_path / "m.onnx") == []


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x07" * 40])
def test_malformed_files(content: bytes, tmp_path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ExportError, match=r"m\.onnx is no ONNX model"):
        check_onnx(path)


def test_truncated_file(clean, tmp_path) -> None:
    path = tmp_path / "m.onnx"
    data = clean().model.SerializeToString()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ExportError, match="is no ONNX model"):
        check_onnx(path)


def test_no_file_and_no_model(tmp_path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        check_onnx(tmp_path / "none.onnx")
    with pytest.raises(UsageError, match="list is neither a path"):
        check_onnx([])


def test_names_the_extra(monkeypatch, clean) -> None:
    model = clean().model
    check = sys.modules[check_onnx.__module__]
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\.\[onnx\]"):
        check_onnx(model)


def test_subgraphs_are_checked_with_constants_of_the_outer_graph(clean) -> None:
    edit = clean()
    inner = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["y", "negative", "zero"], ["q"], "inside")],
        "then",
        [],
        [helper.make_tensor_value_info("q", TensorProto.INT8, None)],
    )
    edit.constant("negative", -1.0)
    edit.constant("condition", True, np.bool_)
    edit.graph.node.append(
        helper.make_node("If", ["condition"], ["i"], "if", then_branch=inner, else_branch=inner)
    )
    findings = check_onnx(edit.model)
    assert {finding.rule for finding in findings} == {"scale-positive"}
    assert {finding.node for finding in findings} == {"inside"}


def test_constants_of_nodes(clean) -> None:
    edit = clean()
    value = helper.make_node("Constant", [], ["from_node"], "constant", value_float=-2.0)
    edit.insert("x_Q", value)
    edit.rewire("x_Q", "x_scale", "from_node")
    assert [(f.rule, f.found) for f in check_onnx(edit.model)] == [("scale-positive", "-2")]


def _chain(length: int):
    """Convolutions with Relu and pairs, ``length`` of them, and a chain of Reshapes as long."""
    nodes, value = [], "x"
    for index in range(length):
        nodes += [
            helper.make_node("QuantizeLinear", [value, "s", "z"], [f"q{index}"]),
            helper.make_node("DequantizeLinear", [f"q{index}", "s", "z"], [f"d{index}"]),
            helper.make_node("Relu", [f"d{index}"], [f"r{index}"]),
            helper.make_node("Identity", [f"r{index}"], [f"i{index}"]),
        ]
        value = f"i{index}"
    nodes.append(helper.make_node("DequantizeLinear", [f"q{length - 1}", "s", "z"], ["m0"]))
    nodes += [helper.make_node("MaxPool", [f"m{i}"], [f"m{i + 1}"]) for i in range(length)]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, [1])],
        [
            helper.make_tensor("s", TensorProto.FLOAT, [], [0.1]),
            helper.make_tensor("z", TensorProto.INT8, [], [0]),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_work_grows_linearly() -> None:
    """Calls of Python functions are counted, not time."""

    def calls(length: int) -> int:
        model, count = _chain(length), 0

        def step(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(step)
        try:
            check_onnx(model)
        finally:
            sys.setprofile(None)
        return count

    small, large = calls(50), calls(400)
    assert large < 9 * small
