"""Every kernel beside the reference model, with generated operators, layouts and integers.

``tools/kernel_audit.py`` runs thousands of these.
"""

from __future__ import annotations

import pytest

from kernel_audit.check import check

CASES = (
    ("conv", "x86"), ("conv_add", "x86"), ("linear", "fbgemm"), ("linear", "x86"), ("resize", "x86"),
    ("avg_pool", "x86"), ("max_pool", "x86"), ("binary", "x86"), ("conv_transpose", "fbgemm"),
)  # fmt: skip


@pytest.mark.parametrize(("family", "engine"), CASES)
def test_kernels_are_within_one_step(family: str, engine: str) -> None:
    found = check(family, 0, engine)
    assert found.compared or found.refused
    assert [str(finding) for finding in found.findings] == []
