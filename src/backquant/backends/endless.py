"""What runtimes with oneDNN inside never finish on integers.

For a depthwise convolution of 16 channels with 14 taps and more along its last axis oneDNN (torch 2.13's and
OpenVINO 2026.4's) writes code without end where the input has a zero point and the CPU has VNNI: the first
call, or the compilation, does not return (``docs/kernels.md``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backquant.backend_config import BackendPatternConfig
from backquant.nn import intrinsic
from backquant.operators.conv import CONV

_ENDLESS = {
    "groups": 16,
    "out_channels": 16,
    "stride[-1]": 1,
    "dilation[-1]": 1,
    "kernel_size[-1]": {"min": 14},
}
_KINDS = {
    kind
    for conv in CONV.values()
    for kind in (
        *(conv.root, conv.relu, conv.qat, conv.relu_qat),
        *(conv.bn, conv.bn_qat, conv.bn_relu, conv.bn_relu_qat),
    )
}
_ADDING = {intrinsic.ConvAdd2d, intrinsic.ConvAddReLU2d}
_FUNCTIONS = {function for conv in CONV.values() for function in conv.functions}
_CONVOLUTIONS = _KINDS | _ADDING | _FUNCTIONS


def that_end(entries: Iterable[BackendPatternConfig]) -> list[BackendPatternConfig]:
    """The entries; those of convolutions do not take what never ends.

    >>> import torch
    >>> conv, linear = (BackendPatternConfig(kind) for kind in (torch.nn.Conv1d, torch.nn.Linear))
    >>> [conv, linear] = that_end([conv, linear])
    >>> linear.where is None
    True
    >>> print(conv.where)
    not (groups = 16, out_channels = 16, stride[-1] = 1, dilation[-1] = 1, kernel_size[-1] ≥ 14)
    """
    found = list(entries)
    for entry in found:
        if _root(entry.pattern) in _CONVOLUTIONS and entry.where is None:
            entry.set_where({"not": _ENDLESS})
    return found


def _root(pattern: Any) -> Any:
    return pattern[0] if isinstance(pattern, tuple) else pattern
