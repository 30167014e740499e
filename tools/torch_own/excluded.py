"""The tests that do not count, and those that fail because backquant differs on purpose, with reasons."""

from __future__ import annotations

__all__ = ["EXCLUDED", "FILES", "ON_PURPOSE", "reason_to_exclude"]

_PRIVATE = "calls a private function of PyTorch's implementation: "

#: Whole files of ``test/quantization`` that are not run.
FILES: dict[str, str] = {
    "fx/test_equalize_fx.py": "equalization, which prepare_fx refuses",
    "fx/test_model_report_fx.py": "ModelReport: reports are backquant's own",
    "fx/test_numeric_suite_fx.py": "the numeric suite, which has no counterpart",
    "fx/test_subgraph_rewriter.py": "tests torch.fx, and no quantization",
}

#: Tests of the files that are run.
EXCLUDED: dict[str, str] = {
    "TestQuantizeFx.test_pattern_match": _PRIVATE + "_is_match",
    "TestQuantizeFx.test_pattern_match_constant": _PRIVATE + "_is_match",
    "TestQuantizeFx.test_register_patterns": _PRIVATE + "_register_quant_pattern and its tables",
    "TestQuantizeFx.test_reroute_tuple_getitem_patterns": _PRIVATE
    + "_reroute_tuple_getitem_pattern",
    "TestQuantizeFx.test_static_lstm_with_custom_fixed_qparams": _PRIVATE
    + "_get_lstm_with_individually_observed_parts",
}


_CLIPPED = (
    "the input of a sigmoid is measured; PyTorch gives it the qparams of the output, which clips it"
)
_KEPT = (
    "what the backend has no entry for runs on integers between integers, as a table of 256 results"
)
_SLOPES = "a PReLU with a slope per channel is float: PyTorch's kernel takes 3 to 17 times as long as float"
_LSTM = (
    "quantized.LSTM computes in float on values that are rounded: no quantized tensors in its tuple"
)
_NO_KERNEL = (
    "what torch has no integer kernel for (its own model does not run) is computed in float"
)

#: Tests that count and fail, by outputs or by graph, because of what is done otherwise.
ON_PURPOSE: dict[str, str] = {
    "TestQuantizeFx.test_convtranspose_per_channel_fails_early": "a kernel runs it: fails nowhere",
    "TestQuantizeFx.test_qconfig_mapping_from_dict": "an unknown key of a dict is an error, not nothing",
    "TestQuantizeFx.test_static_lstm": _LSTM,
    "TestQuantizeFx.test_static_lstm_consume_tuple": _LSTM,
    "TestQuantizeFx.test_sub_scalar": _KEPT,
    "TestQuantizeFxOps.test_general_shape_ops": _NO_KERNEL,
    "TestQuantizeFxOps.test_general_value_ops": _NO_KERNEL,
    "TestQuantizeFxOps.test_getitem": _CLIPPED,
    "TestQuantizeFxOps.test_linear_static_fp16": "a linear layer in float16 runs on float16 weights",
    "TestQuantizeFxOps.test_prelu": _SLOPES,
}


def reason_to_exclude(test: str) -> str:
    """Why ``test`` does not count; nothing if it does.

    >>> reason_to_exclude("TestQuantizeFx.test_sequential")
    ''
    """
    if "." not in test:
        return "a helper whose name begins with test_"
    return EXCLUDED.get(test, "")
