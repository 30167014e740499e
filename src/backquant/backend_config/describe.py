"""Parts of a description in a few words: what diffs, tables and messages print."""

from __future__ import annotations

import re

import torch

from backquant.backend_config.checks import short_text
from backquant.backend_config.declared import phrases
from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints, Ratio
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.naming import operator_label
from backquant.backend_config.pattern import NormalPattern, calls_text
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.dtypes import dtype_name


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
    return ", ".join([text, *phrases(given)])


def range_text(low: float | None, high: float | None) -> str:
    """A range of which an end may be open.

    >>> range_text(-127, None), range_text(-(2**31), 448.0)
    ('[-127, …]', '[-2147483648, 448]')
    """
    ends = ("…" if end is None else f"{end:.10g}" for end in (low, high))
    return f"[{', '.join(ends)}]"


def scales_text(demand: DTypeWithConstraints) -> str:
    """The scales that a demand leaves, in words.

    >>> scales_text(DTypeWithConstraints(torch.quint8, scale_range=(2**-8, None)))
    'scale in [2**-8, …]'
    """
    alone = DTypeWithConstraints(scales=demand.scales, scale_range=demand.scale_range)
    return ", ".join(phrases(alone))


def ratio_text(ratio: Ratio) -> str:
    """The ratios of scales that are admitted, in words.

    >>> ratio_text("power_of_two"), ratio_text((None, 1.0))
    ('input × weight / output scale a power of two', 'input × weight / output scale in […, 1]')
    """
    return phrases(DTypeConfig(requantization_ratio=ratio))[0]


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
    return ", ".join([*words, *phrases(config)])


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
