"""Edits of single lines of PyTorch's tests: what is spelled otherwise in backquant, with the reason.

Each edit says the same in backquant's words, with its reason. Weaker than PyTorch's are: comparisons of
lowered models, within one step; two counts of observers, because quantized inputs are observed here; checks
of TorchScript, which are removed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["LINES", "Line", "with_lines"]


class Line(NamedTuple):
    """``old`` (a regular expression) becomes ``new``, because of ``why``."""

    old: str
    new: str
    why: str


LINES: tuple[Line, ...] = (
    Line(
        r"torch\.jit\.script\(",
        "torch_own.names.unscripted(",
        "TorchScript is left out: the model itself stands where a test scripts it",
    ),
    Line(
        r"torch\.jit\.trace\(orig_mod, calib_data\[0\]\)",
        "orig_mod",
        "TorchScript: likewise, where the model is traced",
    ),
    Line(
        r"torch\.jit\.save\(",
        "torch.save(",
        "TorchScript: likewise, where the script is saved",
    ),
    Line(
        r"torch\.jit\.load\(buffer\)",
        "torch.load(buffer, weights_only=False)",
        "TorchScript: likewise, where it is loaded",
    ),
    Line(
        r"(?m)^ +FileCheck\(\)\.check_count\(\s*'FakeQuantize = prim::GetAttr.*\n.*\.run\(scripted.*$",
        "",
        "TorchScript: the code of the scripted model is looked at",
    ),
    Line(
        r"(?m)^ +scripted\.mods1_0_packed_weight_0 = .*$",
        "",
        "TorchScript: a weight that scripting loses is put back",
    ),
    Line(
        r'for k in \["weight_qscheme", "weight_dtype"\]',
        'for k in ["_extra_state"]',
        "a state_dict holds tensors only: qscheme and dtype of a weight are one tensor in it",
    ),
    Line(
        r'"_packed_weight_0" in state_dict\)',
        "torch_own.names.weight_of(m) is not None)",
        "weights are stored as integers with scales, under the kernel's name, not packed",
    ),
    Line(
        r'torch\.ops\.quantized\.conv2d_unpack\(\s*state_dict\["_packed_weight_0"\]\s*\)',
        'state_dict["graph_module.conv2d_kernel.weight"], state_dict["graph_module.conv2d_kernel.bias"]',
        "likewise",
    ),
    Line(
        r"m\._packed_weight_0\.unpack\(\)",
        "m.conv2d_kernel.weight.clone(), m.conv2d_kernel.bias.clone()",
        "likewise",
    ),
    Line(
        r'self\.assertIn\(\s*"_packed_weight_0", '
        r'result_dict\["quantized"\]\.state_dict\(\)\.keys\(\)\s*\)',
        'self.assertIsNotNone(torch_own.names.weight_of(result_dict["quantized"]))',
        "likewise",
    ),
    Line(
        r'hasattr\(m, "(mods\w+?)_packed_weight_0"\)',
        r'torch_own.names.has_qparams(m, "\1_scale_0")',
        "likewise: a kernel is found by the path of the module that it runs for",
    ),
    Line(
        r"hasattr\(m, attr_name\)",
        "torch_own.names.has_qparams(m, attr_name)",
        "scales and zero points are model.qparams[path], not attributes with generated names",
    ),
    Line(
        r"quantized\.softmax\.scale",
        'quantized.qparams["softmax"].output[0]',
        "likewise",
    ),
    Line(
        r"quantized\.softmax\.zero_point",
        'quantized.qparams["softmax"].output[1]',
        "likewise",
    ),
    Line(
        r"qconfig2 = get_default_qconfig\(\)",
        'qconfig2 = get_default_qconfig("qnnpack")',
        "QConfigs that make the same observers are equal: the test needs three that differ",
    ),
    Line(
        r"qconfig3 = get_default_qconfig\(\)",
        "qconfig3 = default_per_channel_qconfig",
        "likewise",
    ),
    Line(
        r'QConfig\(123, "global"\)',
        "get_default_qconfig()",
        "a QConfig of a number and a text is refused: the test needs three that differ",
    ),
    Line(r'QConfig\(1, "one"\)', 'get_default_qconfig("qnnpack")', "likewise"),
    Line(r'QConfig\(2, "two"\)', "default_per_channel_qconfig", "likewise"),
    Line(
        r'self\.assertRaisesRegex\(AssertionError, "not supported"\)',
        "self.assertRaises(backquant.BackquantError)",
        "errors are of backquant's classes",
    ),
    Line(
        r"self\.assertEqual\(result, result_eager\)",
        "torch_own.names.assert_within_a_step(self, result, result_eager)",
        "batch norms are folded in another order of float operations: an integer may be the next one",
    ),
    Line(
        r"self\.assertEqual\(\s*(result_dict\[\"quantized_output\"\],\s*"
        r"result_dict\[\"quantized_reference_output\"\]),?\s*\)",
        r"torch_own.names.assert_within_a_step(self, \1)",
        "a kernel rounds once where the reference model rounds twice: within one step",
    ),
    Line(
        r"(?s)for n in m\.graph\.nodes:\n +if n\.op == \"call_method\" and n\.target == \"dequantize\":.*?"
        r"quant = quant \+ 1\n",
        'quant, dequant = map(torch_own.graphs.words_of(m).count, ("quantize", "dequantize"))\n',
        "quantize and dequantize are kernels of backquant: see graphs.py",
    ),
    Line(
        r"(?s)(prepare_custom_config_dict = \{\s*['\"]input_quantized_idxs['\"]: \[0\]"
        r".{0,160}?MinMaxObserver\)): 2",
        r"\1: 3",
        "a quantized input is observed: plain integers do not say what they stand for",
    ),
    Line(
        r"(backend_config = BackendConfig\(\))([\s\\]*\.set_backend_pattern_config\(\s*BackendPatternConfig)",
        r"\1.set_engine(backquant.get_native_backend_config().engine)\2",
        "a description says which engine runs it, or the reference model is what converts; PyTorch always "
        "runs its current engine",
    ),
    Line(
        r"(torch\.ops\.quantized_decomposed\.(?:de)?quantize_per_(?:tensor|channel))\)",
        r"\1.default)",
        "graphs hold operators with their overload; tests before 2.2 name them without",
    ),
)


def with_lines(text: str) -> str:
    """``text`` after the edits.

    >>> with_lines("m = torch.jit.script(m)")
    'm = torch_own.names.unscripted(m)'
    """
    for line in LINES:
        text = re.sub(line.old, line.new, text)
    return text
