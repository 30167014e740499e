"""The rules, as a table."""

from __future__ import annotations

from backquant.deploy.tensorrt.finding import Rule
from backquant.deploy.tensorrt.rules.built import BUILT
from backquant.deploy.tensorrt.rules.formats import FORMATS
from backquant.deploy.tensorrt.rules.placement import PLACEMENT
from backquant.deploy.tensorrt.rules.qparams import QPARAMS

__all__ = ["RULES"]

#: Every rule, in the order of the table in docs/deploy-tensorrt.md.
RULES: tuple[Rule, ...] = (*QPARAMS, *FORMATS, *PLACEMENT, *BUILT)
