"""The tests that do not count, with the reason of each."""

from __future__ import annotations

__all__ = ["EXCLUDED", "FILES", "reason_to_exclude"]

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


def reason_to_exclude(test: str) -> str:
    """Why ``test`` does not count; nothing if it does.

    >>> reason_to_exclude("TestQuantizeFx.test_sequential")
    ''
    """
    if "." not in test:
        return "a helper whose name begins with test_"
    return EXCLUDED.get(test, "")
