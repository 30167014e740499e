"""Names that need a person, and the ways out that are named."""

from __future__ import annotations

import re

import pytest
from torch import nn

import backquant
from backquant.migrate.by_hand import GROUPS, ByHand
from backquant.migrate.names import FLAT, FUSERS


def test_names_for_a_person_are_none_of_backquant() -> None:
    """When backquant gets one of them, it belongs into the table of names; those here mean
    something else there."""
    other_meaning = {"quantize", "Granularity"}
    by_hand = {name for group in GROUPS for name in group.names}
    assert {name for name in by_hand if name in dir(backquant)} == other_meaning


def test_a_name_stands_in_one_table() -> None:
    by_hand = [name for group in GROUPS for name in group.names]
    assert len(by_hand) == len(set(by_hand))
    assert set(by_hand) & {*FLAT, *FUSERS} == set()


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: (group.names + group.packages)[0])
def test_the_way_out_exists(group: ByHand) -> None:
    """Every name of backquant that a way out mentions is there; every reason has a way out."""
    mentioned = re.findall(r"backquant\.(\w+)", group.how)
    assert [name for name in mentioned if name not in dir(backquant)] == []
    methods = re.findall(r"BackendPatternConfig\(\.\.\.\)\.(\w+)", group.how)
    assert [m for m in methods if not hasattr(backquant.BackendPatternConfig, m)] == []
    assert group.how
    assert group.why


def test_the_ways_out_of_eager_mode_run() -> None:
    """The code that replaces eager mode, dynamic quantization and QAT, taken from the text."""
    import torch

    for name in ("prepare", "prepare_qat"):
        how = next(group.how for group in GROUPS if name in group.names)
        model = nn.Sequential(nn.Linear(4, 4)).train(name == "prepare_qat")
        scope = {"torch": torch, "backquant": backquant, "model": model}
        scope["example_inputs"] = (torch.randn(2, 4),)
        for step in how.split("; "):
            if " = " in step:
                exec(step, scope)
            else:  # "run the calibration data through it", "train prepared"
                scope["prepared"](*scope["example_inputs"])
        assert scope["quantized"](torch.randn(2, 4)).shape == (2, 4)
