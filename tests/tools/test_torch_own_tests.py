"""The edits that are made of PyTorch's own tests, and which of them are judged."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"

TEXT = """\
import torch
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao import quantization
from torch.ao.quantization.utils import _step


class T:
    def test_public(self):
        self.helper(torch.ao.quantization.MinMaxObserver)

    def test_private(self):
        _step(1)

    def test_private_path(self):
        torch.ao.quantization.fx._steps.run(1)

    def test_scripted(self):
        with open("x") as file:
            m = torch.jit.script(
                file
            )
        m(1)
"""


@pytest.fixture(autouse=True)
def tools() -> Iterator[None]:
    sys.path.insert(0, str(TOOLS))
    yield
    sys.path.remove(str(TOOLS))


def test_the_prefix_is_replaced_and_nothing_else() -> None:
    from torch_own.edits import with_prefix

    edited = with_prefix(TEXT).splitlines()
    before = TEXT.splitlines()
    assert len(edited) == len(before)
    assert edited[0] == "import backquant.ao; import torch"
    for old, new in zip(before[1:], edited[1:], strict=True):
        assert new == old.replace("torch.ao.", "backquant.ao.").replace(
            "from torch.ao ", "from backquant.ao "
        )


def test_statements_of_torchscript_go_and_lines_keep_their_numbers() -> None:
    from torch_own.edits import without_torchscript

    edited = without_torchscript(TEXT)
    ast.parse(edited)
    assert "torch.jit" not in edited
    kept = edited.splitlines()
    assert len(kept) == len(TEXT.splitlines())
    assert kept[-1] == "        m(1)" and kept[18].strip() == "pass"


def test_which_tests_are_not_judged_follows_from_their_own_body() -> None:
    from torch_own.edits import uses_left_out

    assert uses_left_out(TEXT) == {
        "T.test_private": "names _step",
        "T.test_private_path": "names _steps",
        "T.test_scripted": "uses TorchScript",
    }
