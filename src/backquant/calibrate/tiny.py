"""Values that quantization makes zero: all of them nearer to it than half the smallest scale."""

from __future__ import annotations

import torch
from torch import fx, nn

from backquant.calibrate.observers import prepared_parts
from backquant.prepare import Role, prepared_state


def tiny_values(prepared: fx.GraphModule) -> tuple[tuple[str, float], ...]:
    """What was measured to be smaller than half of its observer's ``eps``, with that smallest scale.

    Zeros alone are none of these: they stay what they are. A value whose observer keeps no ``min_val``,
    ``max_val`` and ``eps``, or measures each channel apart, is not known of.

    >>> import torch
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> _ = prepared(torch.full((1, 2), 1e-9))
    >>> [name for name, _ in tiny_values(prepared)]
    ['input_1']
    """
    found: dict[str, float] = {}
    for prefix, part in prepared_parts(prepared):
        sites = prepared_state(part).sites
        for head in sites.groups():
            smallest = _smallest_scale(part.get_submodule(head))
            if sites[head].role is not Role.WEIGHT and smallest is not None:
                found[f"{prefix}{sites[head].value}"] = smallest
    return tuple(found.items())


def _smallest_scale(observer: nn.Module) -> float | None:
    """``eps`` of an observer that measured nothing but values that become zero with it."""
    measuring = getattr(observer, "activation_post_process", observer)
    low, high, eps = (getattr(measuring, name, None) for name in ("min_val", "max_val", "eps"))
    if not all(isinstance(part, torch.Tensor) and part.numel() == 1 for part in (low, high, eps)):
        return None
    assert low is not None and high is not None and eps is not None
    reach = max(abs(float(low)), abs(float(high)))
    return float(eps) if 0 < reach < float(eps) / 2 else None
