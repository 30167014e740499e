"""What is advised for models whose own ``forward`` no capture takes."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

import backquant
from backquant.errors import CaptureError

SOURCE = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 4))])

    def forward(self, x):
        for block in self.blocks:
            x = block(self.small(x)) if int(x.max().item()) > -9 else x
        return x
"""


@pytest.mark.parametrize("folder", ["site-packages", "mine"])
def test_code_of_a_package_is_not_the_users_to_change(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / folder / "a_package.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    module = types.ModuleType("a_package")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "a_package", module)
    exec(compile(SOURCE, str(path), "exec"), vars(module))
    model, x = module.Model().eval(), torch.randn(2, 4)
    with pytest.raises(CaptureError) as raised:
        backquant.quantize(model, x, backend="x86", calibration=[x])
    assert "Changeable" not in raised.value.what
    fix = raised.value.fix
    if folder == "mine":
        assert fix.startswith("move these lines into a submodule")
        return
    given = {"backquant": backquant, "torch": torch, "model": model}
    first, last = fix.splitlines()
    dynamic = last.removeprefix("or without a capture: ")
    assert type(eval(dynamic, given).small) is backquant.nn.quantized.dynamic.Linear
    found = eval(first.replace("...", "[x]"), {**given, "x": x})
    assert found.parts["blocks.0"].kernels and found(x).shape == x.shape
    with pytest.raises(CaptureError) as raised:
        backquant.prepare_qat_fx(
            module.Model(), backquant.get_default_qat_qconfig_mapping("x86"), x
        )
    assert raised.value.fix == "part by part; the largest is model.get_submodule('blocks.0')"
