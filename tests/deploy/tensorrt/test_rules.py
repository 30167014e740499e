"""Every rule: the clean model breaks none, and each change of it breaks exactly the rule it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from backquant.deploy.tensorrt import RULES, check_onnx

Change = Callable[[Any], None]


def found(model: Any) -> set[str]:
    return {finding.rule for finding in check_onnx(model)}


def test_clean_model_breaks_no_rule(clean) -> None:
    model = clean().model
    onnx.checker.check_model(model, full_check=True)
    assert check_onnx(model) == []


def _zero_point(edit: Any) -> None:
    edit.constant("seven", 7, np.int8)
    edit.node("x_Q").input[2] = edit.node("x_DQ").input[2] = "seven"


def _computed_zero_point(edit: Any) -> None:
    edit.insert("x_Q", helper.make_node("Identity", ["zero"], ["computed"], "identity"))
    edit.rewire("x_Q", "zero", "computed")


def _unsigned(edit: Any) -> None:
    edit.constant("unsigned", 0, np.uint8)
    edit.node("x_Q").input[2] = edit.node("x_DQ").input[2] = "unsigned"


def _computed_scale(edit: Any) -> None:
    edit.insert("x_Q", helper.make_node("Abs", ["x_scale"], ["computed"], "abs"))
    edit.rewire("x_Q", "x_scale", "computed")


def _negative_scale(edit: Any) -> None:
    edit.constant("x_scale", -0.5)


def _zero_among_scales(edit: Any) -> None:
    edit.constant("w1_scale", [0.1, 0.0, 0.1, 0.1])


def _infinite_scale(edit: Any) -> None:
    edit.constant("x_scale", np.inf)


def _double_scale(edit: Any) -> None:
    edit.constant("x_scale", 0.5, np.float64)


def _long_zero_point(edit: Any) -> None:
    edit.constant("w1_zero", np.zeros(3), np.int8)


def _scale_matrix(edit: Any) -> None:
    edit.constant("w1_scale", np.full((4, 3), 0.1))
    edit.constant("w1_zero", np.zeros((4, 3)), np.int8)


def _no_axis(edit: Any) -> None:
    node = edit.node("w3_DQ")  # axis 1, which is the default
    del node.attribute[:]


def _wrong_axis(edit: Any) -> None:
    edit.node("w1_DQ").attribute[0].i = 1


def _axis_out_of_range(edit: Any) -> None:
    edit.node("w1_DQ").attribute[0].i = 4


def _activation_per_channel(edit: Any) -> None:
    edit.constant("many", np.full(3, 0.1))
    edit.constant("zeros", np.zeros(3), np.int8)
    for name in ("x_Q", "x_DQ"):
        node = edit.node(name)
        node.input[1], node.input[2] = "many", "zeros"
        node.attribute.append(helper.make_attribute("axis", 1))


def _old_opset(edit: Any) -> None:
    edit.model.opset_import[0].version = 12


def _integer_bias(edit: Any) -> None:
    edit.constant("b1_q", np.zeros(4), np.int32)
    edit.constant("b1_scale", 0.001)
    edit.insert("conv1", helper.make_node("DequantizeLinear", ["b1_q", "b1_scale"], ["bias"], "d"))
    edit.rewire("conv1", "b1", "bias")


def _quantized_bias(edit: Any) -> None:
    edit.constant("b1_scale", 0.01)
    edit.insert("conv1", *pair_of("b1", "b1_scale"))
    edit.rewire("conv1", "b1", "b1_dq")


def pair_of(value: str, scale: str) -> list[Any]:
    quantized = [f"{value}_q", scale, "zero"]
    return [
        helper.make_node("QuantizeLinear", [value, scale, "zero"], quantized[:1], f"{value}_Q"),
        helper.make_node("DequantizeLinear", quantized, [f"{value}_dq"], f"{value}_DQ"),
    ]


def _int4(edit: Any, block: int = 64, axis: int = 0, shape: tuple[int, int] = (196, 2)) -> None:
    edit.model.opset_import[0].version = 21
    blocks = [-(-size // block) if index == axis else size for index, size in enumerate(shape)]
    made = helper.make_tensor("w3", TensorProto.INT4, shape, np.ones(shape, np.int64).flatten())
    next(t for t in edit.graph.initializer if t.name == "w3").CopyFrom(made)
    edit.constant("w3_scale", np.full(blocks, 0.1))
    node = edit.node("w3_DQ")
    del node.attribute[:], node.input[2:]
    node.attribute.extend(
        [helper.make_attribute("axis", axis), helper.make_attribute("block_size", block)]
    )


def _int4_small_blocks(edit: Any) -> None:
    _int4(edit, block=32)


def _int4_with_zero_point(edit: Any) -> None:
    _int4(edit)
    zeros = helper.make_tensor("w3_zero", TensorProto.INT4, (4, 2), np.zeros(8, np.int64))
    next(t for t in edit.graph.initializer if t.name == "w3_zero").CopyFrom(zeros)
    edit.node("w3_DQ").input.append("w3_zero")


def _fp8(edit: Any, value: float = 1.0, *, saturate: int = 1) -> None:
    edit.model.opset_import[0].version = 19
    for tensor in edit.graph.initializer:
        if tensor.data_type == TensorProto.INT8:
            size = int(np.prod(tensor.dims))
            filled = 0.0 if tensor.name.endswith("zero") else value
            made = helper.make_tensor(
                tensor.name, TensorProto.FLOAT8E4M3FN, tensor.dims, [filled] * size
            )
            tensor.CopyFrom(made)
    for node in edit.graph.node:
        if node.op_type == "QuantizeLinear":
            node.attribute.append(helper.make_attribute("saturate", saturate))


def _fp8_without_saturation(edit: Any) -> None:
    _fp8(edit, saturate=0)


def _fp8_not_a_number(edit: Any) -> None:
    _fp8(edit, float("nan"))


def _fp8_old_opset(edit: Any) -> None:
    _fp8(edit)
    edit.model.opset_import[0].version = 18


def _rejected(edit: Any) -> None:
    made = ["d", "d_scale", "d_zero"]
    edit.graph.node.append(helper.make_node("DynamicQuantizeLinear", ["y"], made, "dynamic"))


def _integer_weight(edit: Any) -> None:
    edit.rewire("gemm", "w3_dq", "w3")


def _moved_weight(edit: Any) -> None:
    edit.insert("gemm", helper.make_node("Transpose", ["w3_dq"], ["w3_t"], "moved", perm=[0, 1]))
    edit.rewire("gemm", "w3_dq", "w3_t")


def _float_input(edit: Any) -> None:
    edit.rewire("conv1", "x_dq", "x")


def _float_weight(edit: Any) -> None:
    edit.constant("float", np.ones((4, 3, 3, 3)))
    edit.rewire("conv1", "w1_dq", "float")


def _float_skip(edit: Any) -> None:
    edit.rewire("add", "r1_dq", "r1")


def _pool_of_floats(edit: Any) -> None:
    edit.rewire("pool", "r2_dq", "r2")


def _half_quantized_sum(edit: Any) -> None:
    edit.graph.node.append(helper.make_node("Add", ["x_dq", "x"], ["double"], "double"))


def _max_pool(edit: Any) -> None:
    node = edit.node("pool")
    node.op_type = "MaxPool"
    for name in ("p_Q", "p_DQ"):
        edit.node(name).input[1] = "x_scale"
    edit.constant("x_scale", 0.07)


def _concat(edit: Any, other: str = "r2_dq") -> None:
    node = helper.make_node("Concat", ["r1_dq", other], ["both"], "concat", axis=1)
    edit.graph.node.append(node)


def _concat_of_scales(edit: Any) -> None:
    edit.constant("r2_scale", 0.06)
    _concat(edit)


def _concat_of_floats(edit: Any) -> None:
    _concat(edit, "r2")


def _pair_before_relu(edit: Any) -> None:
    edit.insert("relu1", *pair_of("c1", "r1_scale"))
    edit.rewire("relu1", "c1", "c1_dq")


def _pair_before_addition(edit: Any) -> None:
    edit.insert("add", *pair_of("c2", "r1_scale"))
    edit.rewire("add", "c2", "c2_dq")


def _pair_before_bias(edit: Any) -> None:
    sum_ = helper.make_node("Add", ["y_dq", "b3"], ["z"], "bias")
    edit.graph.node.extend([*pair_of("y", "r1_scale"), sum_])


def _stem(edit: Any) -> None:
    edit.constant("w1", np.ones((4, 3, 7, 7)), np.int8)
    edit.node("conv1").attribute[0].ints[:] = [3, 3, 3, 3]
    pool = helper.make_node("MaxPool", ["r1"], ["m"], "max", kernel_shape=[1, 1])
    edit.insert("r1_Q", pool)
    edit.rewire("r1_Q", "r1", "m")


def _pool_over_three_axes(edit: Any) -> None:
    pool = helper.make_node("MaxPool", ["x_dq"], ["p"], "pool", kernel_shape=[1, 1, 1])
    edit.insert("conv1", pool)


def _transposed(edit: Any) -> None:
    edit.graph.initializer.extend(
        [
            numpy_helper.from_array(np.ones((3, 4, 1, 1), np.int8), "wt"),
            numpy_helper.from_array(np.full(4, 0.1, np.float32), "wt_scale"),
            numpy_helper.from_array(np.zeros(4, np.int8), "wt_zero"),
        ]
    )
    reads = ["wt", "wt_scale", "wt_zero"]
    edit.insert("conv1", helper.make_node("DequantizeLinear", reads, ["wt_dq"], "wt_DQ", axis=1))
    edit.insert("conv1", helper.make_node("ConvTranspose", ["x_dq", "wt_dq"], ["t"], "transposed"))


CHANGES: list[tuple[str, Change]] = [
    ("zero-point", _zero_point),
    ("zero-point", _computed_zero_point),
    ("signed", _unsigned),
    ("scale-constant", _computed_scale),
    ("scale-positive", _negative_scale),
    ("scale-positive", _zero_among_scales),
    ("scale-positive", _infinite_scale),
    ("scale-type", _double_scale),
    ("zero-point-shape", _long_zero_point),
    ("scale-rank", _scale_matrix),
    ("axis-explicit", _no_axis),
    ("axis-length", _wrong_axis),
    ("axis-length", _axis_out_of_range),
    ("activation-per-tensor", _activation_per_channel),
    ("opset", _old_opset),
    ("opset", _fp8_old_opset),
    ("float-bias", _integer_bias),
    ("float-bias", _quantized_bias),
    ("int4-blocks", _int4_small_blocks),
    ("int4-blocks", _int4_with_zero_point),
    ("fp8-range", _fp8_without_saturation),
    ("fp8-range", _fp8_not_a_number),
    ("rejected-operator", _rejected),
    ("weight-dequantize", _integer_weight),
    ("weight-direct", _moved_weight),
    ("inputs-quantized", _float_input),
    ("inputs-quantized", _float_weight),
    ("skip-quantized", _float_skip),
    ("pool-quantized", _pool_of_floats),
    ("add-quantized", _half_quantized_sum),
    ("max-pool-scale", _max_pool),
    ("concat-scales", _concat_of_scales),
    ("concat-scales", _concat_of_floats),
    ("extra-pair", _pair_before_relu),
    ("extra-pair", _pair_before_addition),
    ("extra-pair", _pair_before_bias),
    ("stem", _stem),
    ("pool-3d", _pool_over_three_axes),
    ("transposed", _transposed),
]


@pytest.mark.parametrize(("rule", "change"), CHANGES, ids=lambda v: getattr(v, "__name__", v))
def test_change_breaks_exactly_its_rule(rule: str, change: Change, clean) -> None:
    edit = clean()
    change(edit)
    assert found(edit.model) == {rule}


def test_every_rule_has_a_change() -> None:
    assert {rule for rule, _ in CHANGES} == {rule.id for rule in RULES}
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_every_rule_has_a_citation() -> None:
    for rule in RULES:
        assert rule.source.startswith("https://") and rule.basis and rule.title


@pytest.mark.parametrize("change", [_int4, _fp8, _concat])
def test_other_forms_that_are_right(change: Change, clean) -> None:
    edit = clean()
    change(edit)
    assert found(edit.model) == set()


def test_values_and_places_are_named(clean) -> None:
    edit = clean()
    _zero_point(edit)
    first = check_onnx(edit.model)[0]
    assert (first.node, first.expected, first.found) == ("x_Q", "0", "7")
    assert first.severity == "error" and first.citation.startswith("https://docs.nvidia.com")
    assert first.to_dict()["rule"] == "zero-point"


def test_float_operators_are_no_matter(clean) -> None:
    """Nothing is said about operators that are not quantized."""
    nodes = [helper.make_node("Relu", ["x"], ["y"], "relu")]
    graph = helper.make_graph(
        nodes,
        "floats",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    assert check_onnx(helper.make_model(graph)) == []
