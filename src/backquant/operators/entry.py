"""The kinds of entry that operator families are written in.

Each function gives a fresh ``BackendPatternConfig`` without dtype configs; ``admit`` adds those,
copies of their own to every entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from backquant.backend_config import BackendPatternConfig, DTypeConfig, ObservationType


def admit(
    entries: Iterable[BackendPatternConfig], dtype_configs: Sequence[DTypeConfig]
) -> list[BackendPatternConfig]:
    """``entries``, each admitted in ``dtype_configs``.

    >>> import torch
    >>> [e] = admit([observed(torch.nn.ELU)], [DTypeConfig(input_dtype=torch.quint8)])
    >>> e.pattern.__name__, e.dtype_configs[0].input_dtype
    ('ELU', torch.quint8)
    """
    return [entry.set_dtype_configs([c.copy() for c in dtype_configs]) for entry in entries]


def observed(pattern: Any) -> BackendPatternConfig:
    """``pattern`` computes new values: its output gets qparams of its own.

    >>> import torch
    >>> observed(torch.nn.ELU).observation_type.name
    'OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT'
    """
    return BackendPatternConfig(pattern).set_observation_type(
        ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
    )


def sharing(pattern: Any) -> BackendPatternConfig:
    """``pattern`` rearranges, selects or averages values: its output keeps the input's qparams.

    >>> sharing("reshape").observation_type.name
    'OUTPUT_SHARE_OBSERVER_WITH_INPUT'
    """
    return BackendPatternConfig(pattern).set_observation_type(
        ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    )


def functional(
    pattern: Any, *, weight: int, bias: int | None = None, activation: int | None = None
) -> BackendPatternConfig:
    """A function that takes its weight (and bias) as arguments at these positions.

    >>> import torch
    >>> functional(torch.nn.functional.linear, weight=1, bias=2)._input_type_to_index
    {'weight': 1, 'bias': 2}
    """
    places = {"weight": weight, "bias": bias, "input": activation}
    return observed(pattern)._set_input_type_to_index(
        {name: place for name, place in places.items() if place is not None}
    )


def swapped(
    pattern: Any, root: type[nn.Module], reference: type[nn.Module]
) -> BackendPatternConfig:
    """A module whose ``root`` becomes ``reference`` when the model is converted.

    >>> import torch
    >>> swapped(torch.nn.Linear, torch.nn.Linear, torch.nn.Identity).root_module.__name__
    'Linear'
    """
    return observed(pattern).set_root_module(root).set_reference_quantized_module(reference)


def fusion(
    pattern: tuple[Any, ...], fused: type[nn.Module], fuser: Callable[..., Any]
) -> BackendPatternConfig:
    """A sequence in forward order that ``fuser(is_qat, *parts)`` turns into ``fused``.

    >>> import torch
    >>> def fuse(is_qat, linear, relu):
    ...     return torch.nn.Sequential(linear, relu)
    >>> fusion((torch.nn.Linear, torch.nn.ReLU), torch.nn.Sequential, fuse).fused_module.__name__
    'Sequential'
    """
    return observed(pattern).set_fused_module(fused).set_fuser_method(fuser)
