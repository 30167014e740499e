"""``pytest --backquant-backend NAME``."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

pytest_plugins = "pytester"

PLUGIN = "backquant.conformance_plugin"
INSTALLED = [point.value for point in metadata.entry_points(group="pytest11")]
LOADED = () if PLUGIN in INSTALLED else ("-p", PLUGIN)


def test_a_claim_is_a_test(pytester: pytest.Pytester) -> None:
    """One that holds passes; one that no kernel keeps fails, with the reason."""
    pytester.makepyfile("def test_own(): pass")
    pytester.makefile(
        ".yaml",
        vendor="schema_version: 1\nname: vendor\nengine: x86\nentries:\n"
        "- pattern: torch.mul\n"
        "  dtype_configs: [{input_dtype: quint8, output_dtype: quint8, "
        "tolerance: {steps: 1, reason: float32}}]\n"
        "- pattern: operator.floordiv\n"
        "  dtype_configs: [{input_dtype: quint8, output_dtype: quint8}]\n",
    )
    run = pytester.runpytest_subprocess(*LOADED, "--backquant-backend", "vendor.yaml")
    run.assert_outcomes(passed=2, failed=1)
    run.stdout.fnmatch_lines(["*not integer: no-kernel: an integer kernel for floordiv*"])


def test_what_cannot_be_tried_is_skipped(pytester: pytest.Pytester) -> None:
    """Without an engine nothing is computed, which is no pass; and the time may not suffice."""
    pytester.makefile(
        ".yaml",
        npu="schema_version: 1\nname: npu\nentries:\n- pattern: torch.mul\n"
        "  dtype_configs: [{input_dtype: quint8, output_dtype: quint8}]\n",
    )
    run = pytester.runpytest_subprocess(*LOADED, "--backquant-backend", "npu.yaml", "-rs")
    run.assert_outcomes(skipped=1)
    run.stdout.fnmatch_lines(["*untried: no engine of it is here*"])
    late = ("--backquant-backend", "npu.yaml", "--backquant-minutes", "0", "-rs")
    run = pytester.runpytest_subprocess(*LOADED, *late)
    run.assert_outcomes(skipped=1)
    run.stdout.fnmatch_lines(["*the time was up*"])


def test_it_imports_nothing_without_the_option() -> None:
    code = "import sys, backquant.conformance_plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
