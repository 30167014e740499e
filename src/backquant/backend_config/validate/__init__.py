"""Validation of a backend description: findings with a place and a severity, never an exception.

>>> import torch
>>> from backquant.backend_config import BackendConfig, BackendPatternConfig
>>> entry = BackendPatternConfig(torch.nn.Linear).set_root_module(torch.nn.Linear)
>>> for finding in validate(BackendConfig("mine").set_backend_pattern_config(entry)):
...     print(finding)
warning: entry 0 (torch.nn.Linear): no dtype configs: the pattern is never quantized [no-dtype-configs]
  fix  set dtype_configs
error: entry 0 (torch.nn.Linear): root_module: the root module torch.nn.Linear has no reference \
module here [root-without-reference]
  fix  set reference_quantized_module
"""

from __future__ import annotations

from typing import Any

from backquant.backend_config.description import Description
from backquant.backend_config.validate.dtype_configs import dtype_config_findings
from backquant.backend_config.validate.engine import engine_dtypes, engine_findings
from backquant.backend_config.validate.entries import Neighbours, entry_findings
from backquant.backend_config.validate.finding import Finding, Place, Severity

__all__ = ["Finding", "Severity", "validate"]


def validate(config: Description, engine: Any = None) -> list[Finding]:
    """What is contradictory, idle or worth a look in ``config``, in the order of its entries.

    ``engine``: an object that names its ``dtypes`` (or ``activation_dtypes`` and ``weight_dtypes``),
    or None: then nothing is said about dtypes that an engine may lack. Raises ``SpecError`` when the
    engine names none. The rules stand in the docstrings of the modules beside this one.
    """
    dtypes = engine_dtypes(engine)
    neighbours = Neighbours(config)
    findings: list[Finding] = []
    for index, (pattern, entry) in enumerate(config.shared_entries.items()):
        place = Place(index, str(pattern))
        findings.extend(entry_findings(entry, neighbours, place))
        findings.extend(dtype_config_findings(entry.dtype_configs, place, entry.where))
        if dtypes is not None:
            findings.extend(engine_findings(entry.dtype_configs, dtypes, place))
    return findings
