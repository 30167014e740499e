"""Whose lines errors name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import backquant
from backquant.graph.tracer import is_users, user_line

PACKAGES = Path(torch.__file__).parents[1]


@pytest.mark.parametrize("name", ["torchvision/models/vgg.py", "torch_geometric/__init__.py"])
def test_packages_whose_names_begin_with_torch_are_the_users(name: str) -> None:
    path = str(PACKAGES / name)
    assert is_users(path)
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile("1 / 0", path, "exec"))
    assert user_line(raised.value).startswith(f"{path}:1: ")


def test_what_belongs_to_torch_and_to_this_package_is_not() -> None:
    own = Path(backquant.__file__).parent
    assert not is_users(torch.nn.__file__)
    assert not is_users(str(own / "graph" / "tracer.py"))
    assert is_users(str(own.with_name("backquant_npu") / "npu.py"))
    assert not is_users("<string>")
