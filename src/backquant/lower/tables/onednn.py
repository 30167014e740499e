"""The table of the engines ``x86`` and ``onednn``: oneDNN kernels on plain integer tensors."""

from __future__ import annotations

from backquant.lower.rule import LowerRule
from backquant.lower.tables.common import common_rules
from backquant.lower.tables.conv_add import conv_add_rules
from backquant.lower.tables.onednn_weighted import onednn_weighted_rules
from backquant.lower.tables.quantized_weighted import quantized_transposed_rules

__all__ = ["rules"]


def rules() -> list[LowerRule]:
    """All rules, in order of preference among those that fit one occurrence.

    >>> [rule.name for rule in rules()][:3]
    ['conv + add + relu', 'conv + add', 'conv + activation']
    """
    return [
        *conv_add_rules(),
        *onednn_weighted_rules(),
        *quantized_transposed_rules(),
        *common_rules(),
    ]
