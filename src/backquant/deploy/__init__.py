"""Deployment: writers of other runtimes' formats, and what these runtimes make of the files.

The graph that is exported is the reference model in the decomposed dialect. ``target`` is the seam: a
target checks an ``ExportJob``, writes it, and reads back the kernels that its runtime will use.
"""

from __future__ import annotations

from backquant.deploy.exported import Exported, TargetKernel, Written
from backquant.deploy.job import ExpectedOperator, ExportJob, expected_operators
from backquant.deploy.portable import portable
from backquant.deploy.program import Program
from backquant.deploy.read_sizes import write_read_sizes
from backquant.deploy.run import check_modules, check_operators, run_export
from backquant.deploy.target import (
    Requirement,
    Target,
    check_installed,
    check_version,
    find_target,
    list_targets,
    usual_suffix,
)

__all__ = [
    "ExpectedOperator",
    "ExportJob",
    "Exported",
    "Program",
    "Requirement",
    "Target",
    "TargetKernel",
    "Written",
    "check_installed",
    "check_modules",
    "check_operators",
    "check_version",
    "expected_operators",
    "find_target",
    "list_targets",
    "portable",
    "run_export",
    "usual_suffix",
    "write_read_sizes",
]
