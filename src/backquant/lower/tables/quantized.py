"""The table of the engines ``fbgemm`` and ``qnnpack``: torch's ``quantized::`` kernels."""

from __future__ import annotations

from backquant.lower.rule import LowerRule
from backquant.lower.tables.common import common_rules
from backquant.lower.tables.quantized_weighted import (
    quantized_transposed_rules,
    quantized_weighted_rules,
)

__all__ = ["rules"]


def rules() -> list[LowerRule]:
    """All rules, in order of preference among those that fit one occurrence.

    >>> [rule.name for rule in rules()][:2]
    ['conv + activation', 'conv']
    """
    return [*quantized_weighted_rules(), *quantized_transposed_rules(), *common_rules()]
