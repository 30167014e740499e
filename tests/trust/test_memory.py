"""Memory is flat after warm-up; ``tools/memory.py`` by itself makes thousands of calls, and cycles."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

TOOL = Path(__file__).parents[2] / "tools" / "memory.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("memory", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_calls_of_changing_shapes_take_no_memory(tool: Any) -> None:
    """In a fork, whose memory is its own."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            torch.set_num_threads(1)
            status = tool.main(["calls", "--count", "300"])
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_histogram_of_everything_stays_within_its_bound(tool: Any) -> None:
    step = tool.histogram("x86")
    for number in range(20):
        step(number)  # asserts how many bins there are
