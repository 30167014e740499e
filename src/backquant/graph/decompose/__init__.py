"""Modules of several operators, traced as the operators that they are in evaluation mode."""

from backquant.graph.decompose.traced_modules import COMPOSED, Decomposition, decomposition_of

__all__ = ["COMPOSED", "Decomposition", "decomposition_of"]
