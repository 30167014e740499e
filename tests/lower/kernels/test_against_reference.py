"""Every kernel beside the reference model, with generated operators, layouts and integers.

``tools/kernel_audit.py`` runs thousands of these.
"""

from __future__ import annotations

import pytest

from kernel_audit.check import ENGINES, FAMILIES, check

SEEDS = 4
OWN = ("conv", "conv_add", "conv_transpose", "linear")  # kernels that differ by engine


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_are_within_one_step(family: str, engine: str) -> None:
    if family not in OWN and engine != "x86":
        pairs = [check(family, 1000 + ENGINES.index(engine), engine)]
    else:
        pairs = [check(family, seed, engine) for seed in range(SEEDS)]
    assert [str(finding) for outcome in pairs for finding in outcome.findings] == []
