from __future__ import annotations

from typing import Any

import torch
from torch import nn

from backquant.match.rules import RuleTable
from backquant.prepare import give_qconfigs
from backquant.qconfig import QConfigMapping, default_qconfig, default_weight_only_qconfig


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(1, 1), nn.Linear(1, 1), nn.ReLU()
        self.inner = nn.Sequential(nn.Conv1d(1, 1, 1))


def given(mapping: QConfigMapping, **own: Any) -> dict[str, Any]:
    block = Block()
    for name, qconfig in own.items():
        block.get_submodule(name).qconfig = qconfig
    give_qconfigs(block, "block", default_qconfig, RuleTable(mapping))
    return {name: module.qconfig for name, module in block.named_modules()}


def test_parts_inherit() -> None:
    assert set(given(QConfigMapping()).values()) == {default_qconfig}


def test_rules_for_parts_are_torchs() -> None:
    """By class, and by name, which outweighs it; a part's own attribute outweighs both."""
    import torch.ao.quantization as tq
    from torch.ao.quantization.quantize import propagate_qconfig_

    mapping = QConfigMapping().set_object_type(nn.Linear, None)
    mapping.set_module_name("block.two", default_weight_only_qconfig)
    mapping.set_module_name("block.inner", None)
    found = given(mapping, three="own")
    holder = nn.ModuleDict({"block": Block()})
    holder["block"].three.qconfig = tq.default_qconfig
    asked = {"": tq.default_qconfig, nn.Linear: None, "block.inner": None}
    propagate_qconfig_(holder, {**asked, "block.two": tq.default_weight_only_qconfig})
    expected = {n: m.qconfig for n, m in holder["block"].named_modules()}
    kinds = {None: "none", "own": "own"}

    def kind(qconfig: Any) -> str:
        if qconfig in kinds:
            return kinds[qconfig]
        return "weight only" if qconfig.activation is torch.nn.Identity else "static"

    assert {n: kind(q) for n, q in found.items()} == {
        "": "static",
        "one": "none",
        "two": "weight only",
        "three": "own",
        "inner": "none",
        "inner.0": "none",
    }
    names = ["one", "two", "three", "inner", "inner.0"]
    assert [expected[n] is None for n in names] == [found[n] is None for n in names]
