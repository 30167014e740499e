"""Patterns and entries as text, in the form of PyTorch's backend documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backquant.backend_config.naming import functional_name
from backquant.backend_config.pattern import Pattern

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
