"""Parts of a description in a few words: what diffs, tables and messages print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from backquant.backend_config.checks import short_text
from backquant.backend_config.declared import phrases
from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints, Ratio
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.naming import functional_name, operator_label
from backquant.backend_config.pattern import NormalPattern, Pattern, calls_text
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


_FIELDS_WITH_LAYOUT = ("pattern", "dtype_configs", "num_tensor_args_to_observation_type")


def pattern_to_human_readable(p: Pattern) -> Any:
    """The pattern ``p``, with functions that do not know their own name replaced by their names.

    Functions chosen at call time (``boolean_dispatch``) become the name in ``torch.nn.functional``;
    everything else, nested tuples included, stays. For text, use ``operator_name`` or
    ``str(config.normal_pattern)``.

    >>> import torch
    >>> pattern_to_human_readable((torch.nn.functional.max_pool2d, "view"))
    ('torch.nn.functional.max_pool2d', 'view')
    """
    if isinstance(p, tuple):
        return tuple(pattern_to_human_readable(item) for item in p)
    if "boolean_dispatch" in getattr(p, "__qualname__", ""):
        return functional_name(p) or p
    return p


def entry_to_pretty_str(entry: Mapping[str, Any]) -> str:
    """The dict of an entry (``BackendPatternConfig.to_dict()``) over several lines.

    The pattern comes first, then dtype configs and the observation types by number of tensor
    arguments, one line each, then the other fields.

    >>> import torch
    >>> print(entry_to_pretty_str({"observation_type": 0, "pattern": "view"}))
    {
      'pattern': view,
      'observation_type': 0,
    }
    """
    lines = ["{"]
    if "pattern" in entry:
        lines.append(f"  'pattern': {pattern_to_human_readable(entry['pattern'])},")
    if "dtype_configs" in entry:
        lines.append("  'dtype_configs': [")
        for dtype_config in entry["dtype_configs"]:
            lines.append("    {")
            lines += [f"      '{key}': {value}," for key, value in dtype_config.items()]
            lines.append("    },")
        lines.append("  ],")
    by_count = entry.get("num_tensor_args_to_observation_type")
    if by_count is not None:
        lines.append("  'num_tensor_args_to_observation_type': {")
        lines += [f"    {count}: {kind}," for count, kind in by_count.items()]
        lines.append("  },")
    for key, value in entry.items():
        if key not in _FIELDS_WITH_LAYOUT:
            lines.append(f"  '{key}': {value},")
    return "\n".join([*lines, "}"])
