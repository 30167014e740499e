"""Conditions on the use of an operator: what a kernel, a shape or an attribute may be.

``quantities`` names what there is to say, ``expressions`` computes with it, ``condition`` compares and
joins; ``names`` and ``contradictions`` find what makes no sense. ``backquant.match`` evaluates.
"""

from backquant.backend_config.conditions.condition import (
    AllOf,
    AnyOf,
    Comparison,
    Condition,
    Literals,
    NotSo,
    comparisons_in,
    condition_data,
    condition_from,
    conjuncts,
    contradictions,
    quantities_of,
)
from backquant.backend_config.conditions.vocabulary import check_names, has_conditions, part_names

__all__ = [
    "AllOf",
    "AnyOf",
    "Comparison",
    "Condition",
    "Literals",
    "NotSo",
    "check_names",
    "comparisons_in",
    "condition_data",
    "condition_from",
    "conjuncts",
    "contradictions",
    "has_conditions",
    "part_names",
    "quantities_of",
]
