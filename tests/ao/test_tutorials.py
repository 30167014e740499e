"""PyTorch's tutorials, written anew as scripts: one replacement of the prefix migrates each."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from backquant.migrate import migrate_source

SCRIPTS = {path.stem: path for path in Path(__file__).with_name("tutorials").glob("*.py")}


def with_prefix(text: str) -> str:
    """As ``sed 's/torch\\.ao\\./backquant.ao./g'``."""
    return re.sub(r"\btorch\.ao\.", "backquant.ao.", text)


def run(text: str, name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": name}
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, name, "exec"), names)
    return names


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_replacement_migrates(name: str) -> None:
    text = SCRIPTS[name].read_text(encoding="utf-8")
    theirs, ours = run(text, name), run(with_prefix(text), name)
    assert type(ours["quantized"]) is not type(theirs["quantized"])
    assert not any("torch.ao" in str(type(m)) for m in ours["quantized"].modules())
    assert abs(ours["step"] - theirs["step"]) <= 0.1 * theirs["step"]
    if "trained" in theirs:  # PyTorch's products of 8-bit integers saturate where a CPU has no VNNI
        assert torch.equal(ours["trained"], theirs["trained"])
        assert (ours["outputs"] - ours["trained"]).abs().max() <= 1.01 * theirs["step"]
        return
    if "in_float" in theirs:  # the two search for the range of a histogram differently
        errors = [(names["outputs"] - names["in_float"]).norm() for names in (theirs, ours)]
        assert errors[1] <= 1.1 * errors[0]
        return
    difference = (ours["outputs"] - theirs["outputs"]).abs().max()
    assert difference <= 1.01 * theirs["step"], f"{difference / theirs['step']:.2f} steps"


@pytest.mark.parametrize("name", SCRIPTS)
def test_migrate_has_nothing_to_list(name: str) -> None:
    text = SCRIPTS[name].read_text(encoding="utf-8")
    result = migrate_source(text, name)
    assert result.findings == ()
    assert result.after.replace("import backquant.ao\n", "") == with_prefix(text)
