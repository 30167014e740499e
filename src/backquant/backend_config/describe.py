"""Parts of a description in a few words: what diffs, tables and messages print."""

from __future__ import annotations

import re
from typing import Any

import torch

from backquant.backend_config.defaults import QuantDefault
from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints, Ratio
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.naming import operator_name
from backquant.backend_config.numbers import short_text
from backquant.backend_config.pattern import NormalPattern
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.backend_config.pattern_text import calls_text
from backquant.dtypes import Granularity, dtype_name


def operator_label(op: Any) -> str:
    """A name that is short and still tells modules, functions, and sub-packages apart.

    >>> operator_label(torch.nn.Conv2d), operator_label(torch.nn.functional.relu)
    ('nn.Conv2d', 'F.relu')
    >>> operator_label(torch.conv2d), operator_label("view"), operator_label(torch.ops.aten.mm.default)
    ('torch.conv2d', '.view()', 'aten.mm.default')
    """
    name = operator_name(op)
    for prefix, short in (
        ("torch.nn.functional.", "F."),
        ("torch.nn.", "nn."),
        ("torch.ops.", ""),
        ("backquant.nn.quantized.", ""),
        ("backquant.nn.", ""),
    ):
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name


def describe_pattern(pattern: NormalPattern) -> str:
    """A sequence with arrows, anything else as nested calls.

    >>> from backquant.backend_config import MatchAllNode, from_reversed, normal_form
    >>> describe_pattern(normal_form((torch.nn.Conv2d, torch.nn.ReLU)))
    'nn.Conv2d → nn.ReLU'
    >>> describe_pattern(from_reversed((torch.add, MatchAllNode, torch.nn.Conv2d)))
    'torch.add(*, nn.Conv2d)'
    """
    if pattern.is_sequential and pattern.nodes[0].kind != "any":
        return " → ".join(operator_label(node.op) for node in pattern.nodes)
    return calls_text(pattern, operator_label)


def describe_entry(entry: BackendPatternConfig) -> str:
    """The pattern of an entry, behind its name if it has one.

    >>> import torch
    >>> from backquant.backend_config import GraphPattern
    >>> twice = GraphPattern(["x"], {"sum": (torch.add, "x", "x")}, name="twice")
    >>> describe_entry(BackendPatternConfig(twice))
    'twice = torch.add(a, a)'
    """
    text = describe_pattern(entry.normal_pattern)
    named = isinstance(entry.pattern, GraphPattern) and entry.pattern.name
    return f"{named} = {text}" if named else text


def describe_dtype(given: DTypeWithConstraints) -> str:
    """A dtype with its constraints; ``any`` without a dtype.

    >>> describe_dtype(DTypeWithConstraints(torch.qint8, quant_min_lower_bound=-127,
    ...                                     quant_max_upper_bound=127, scale_min_lower_bound=2**-12))
    'qint8 [-127, 127], scale ≥ 2**-12'
    """
    text = dtype_name(given.dtype) if given.dtype is not None else "any"
    low, high = given.quant_min_lower_bound, given.quant_max_upper_bound
    if low is not None or high is not None:
        text += f" {range_text(low, high)}"
    words = []
    if given.scale_min_lower_bound is not None:
        words.append(f"scale ≥ {short_text(float(given.scale_min_lower_bound))}")
    if given.scale_max_upper_bound is not None:
        words.append(f"scale ≤ {short_text(float(given.scale_max_upper_bound))}")
    if given.scale_exact_match is not None:
        words.append(f"scale = {short_text(given.scale_exact_match)}")
    if given.zero_point_exact_match is not None:
        words.append(f"zero point = {given.zero_point_exact_match}")
    if given.symmetric is not None:
        words.append("symmetric" if given.symmetric else "affine")
    if given.granularity is not None:
        words.append(Granularity.parse(given.granularity).words)
    if given.ch_axis is not None:
        words.append(f"channels on axis {given.ch_axis}")
    if given.power_of_two_scale:
        words.append("power-of-two scale")
    if given.scales is not None or given.scale_range is not None:
        words.append(scales_text(given))
    if given.scale_dtype is not None:
        words.append(f"scales in {dtype_name(given.scale_dtype)}")
    return ", ".join([text, *words])


def range_text(low: float | None, high: float | None) -> str:
    """A range of which an end may be open.

    >>> range_text(-127, None), range_text(-(2**31), 448.0)
    ('[-127, …]', '[-2147483648, 448]')
    """
    ends = ("…" if end is None else f"{end:.10g}" for end in (low, high))
    return f"[{', '.join(ends)}]"


def scales_text(given: DTypeWithConstraints) -> str:
    """The scales that a demand leaves, in words.

    >>> scales_text(DTypeWithConstraints(torch.quint8, scale_range=(2**-8, None)))
    'scale in [2**-8, …]'
    """
    if given.scales is not None:
        return f"scale one of {', '.join(map(short_text, given.scales))}"
    ends = ("…" if end is None else short_text(end) for end in given.scale_range or ())
    return f"scale in [{', '.join(ends)}]"


def ratio_text(ratio: Ratio) -> str:
    """The ratios of scales that are admitted, in words.

    >>> ratio_text("power_of_two"), ratio_text((None, 1.0))
    ('input × weight / output scale a power of two', 'input × weight / output scale in […, 1]')
    """
    if ratio == "power_of_two":
        return "input × weight / output scale a power of two"
    ends = ("…" if end is None else short_text(end) for end in ratio)
    return f"input × weight / output scale in [{', '.join(ends)}]"


def bias_step_text(bound: float) -> str:
    """How coarse the products beside a bias may be, in words.

    >>> bias_step_text(1)
    'a bias beside input × weight / output scale ≤ 1'
    """
    return f"a bias beside input × weight / output scale ≤ {short_text(float(bound))}"


def describe_dtype_config(config: DTypeConfig) -> str:
    """``input × weight → output``, then bias and what is dynamic.

    >>> describe_dtype_config(DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float))
    'quint8 × qint8 → quint8, bias float32'
    >>> describe_dtype_config(DTypeConfig(torch.quint8, torch.float, torch.qint8, is_dynamic=True))
    'quint8 × qint8 → float32, dynamic'
    """
    parts = {
        role: describe_dtype(getattr(config, f"{role}_dtype_with_constraints"))
        for role in ("input", "weight", "output")
    }
    shown = {role: f"({text})" if _has_commas(text) else text for role, text in parts.items()}
    left = shown["input"] if shown["weight"] == "any" else f"{shown['input']} × {shown['weight']}"
    words = [f"{left} → {shown['output']}"]
    if config.bias_dtype is not None:
        words.append(f"bias {str(config.bias_dtype).removeprefix('torch.')}")
    if config.bias_scale is not None:
        words.append(f"bias scale = {config.bias_scale.replace('_times_', ' × ')}")
    if config.rounding is not None:
        words.append(f"rounded {config.rounding.replace('_', ' ')}")
    if config.requantization is not None:
        words.append(f"requantized by {config.requantization.replace('_', ' ')}")
    if config.requantization_ratio is not None:
        words.append(ratio_text(config.requantization_ratio))
    if config.bias_step_upper_bound is not None:
        words.append(f"bias step ≤ {short_text(float(config.bias_step_upper_bound))}")
    if config.is_dynamic is not None:
        words.append("dynamic" if config.is_dynamic else "not dynamic")
    if config.table_entries is not None:
        words.append(f"from a table of {config.table_entries}")
    if config.tolerance is not None:
        words.append(f"off by {config.tolerance.steps:g} at most")
    if config.where is not None:
        words.append(f"where {config.where}")
    return ", ".join(words)


def _has_commas(text: str) -> bool:
    """Whether a comma stands outside of the range in brackets."""
    return "," in re.sub(r"\[.*?\]", "", text)


def mode_of(config: DTypeConfig) -> str:
    """How a dtype config quantizes: ``static``, ``dynamic``, ``weight-only``, or ``float``.

    >>> mode_of(DTypeConfig(torch.quint8, torch.quint8)), mode_of(DTypeConfig(is_dynamic=True))
    ('static', 'dynamic')
    >>> mode_of(DTypeConfig(torch.float, torch.float, torch.quint8)), mode_of(DTypeConfig(torch.float16))
    ('weight-only', 'float')
    """
    if config.is_dynamic:
        return "dynamic"
    if not _is_float(config.input_dtype):
        return "static"
    if config.weight_dtype is not None and not _is_float(config.weight_dtype):
        return "weight-only"
    return "static" if not _is_float(config.output_dtype) else "float"


def _is_float(dtype: torch.dtype | None) -> bool:
    """Whether values stay float: a float wider than 8 bits, or none."""
    return dtype is None or (dtype.is_floating_point and dtype.itemsize > 1)


def describe_default(default: QuantDefault) -> str:
    """One role of tensor by default.

    >>> describe_default(QuantDefault("histogram", dtype=torch.quint8, reduce_range=True))
    'histogram, quint8, reduced range'
    """
    named = isinstance(default.observer, str)
    words = [default.observer.replace("_", " ") if named else operator_label(default.observer)]  # type: ignore[union-attr]
    if default.dtype is not None:
        words.append(dtype_name(default.dtype))
    if default.qscheme is not None:
        words.append(str(default.qscheme).removeprefix("torch.").replace("_", " "))
    if default.quant_min is not None:
        words.append(f"[{default.quant_min}, {default.quant_max}]")
    if default.reduce_range is not None:
        words.append("reduced range" if default.reduce_range else "full range")
    if default.eps is not None:
        words.append(f"scale ≥ {short_text(default.eps)}")
    if default.ch_axis is not None:
        words.append(f"channel axis {default.ch_axis}")
    if default.granularity is not None:
        words.append(Granularity.parse(default.granularity).words)
    if default.averaging_constant is not None:
        words.append(f"averaging constant {default.averaging_constant}")
    if default.is_dynamic is not None:
        words.append("dynamic" if default.is_dynamic else "not dynamic")
    if default.fake_quantize is not None:
        words.append(default.fake_quantize.replace("_", " "))
    return ", ".join(words)
