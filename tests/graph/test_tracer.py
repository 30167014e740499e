"""Whose lines errors name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import backquant
from backquant.graph.interception import is_users, user_line

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


def test_numbers_of_numpy_are_numbers() -> None:
    """The code of a graph does not import numpy: it named ``np`` (CTRL of transformers scales so)."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.scale = np.sqrt(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale + np.float32(2)

    x, mapping = torch.randn(2, 4), backquant.get_default_qat_qconfig_mapping("x86")
    for prepare in (backquant.prepare_fx, backquant.prepare_qat_fx):
        model = Scaled().train(prepare is backquant.prepare_qat_fx)
        prepared = prepare(model, mapping, (x,), backend_config="x86")
        numbers = {type(arg) for node in prepared.graph.nodes for arg in node.args}
        assert numbers <= {float, torch.fx.Node}
        prepared(x).sum().backward()


class Layer(torch.nn.Module):
    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.decides, self.linear = decides, torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.decides and x.sum() > 1e9:
            return x
        return self.linear(x)


class Tries(torch.nn.Module):
    """Calls its layers with an argument, and without where they have none (speechbrain's x-vectors)."""

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Layer(False), Layer(decides)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            try:
                x = block(x, lengths=None)
            except TypeError:
                x = block(x)
        return x


def test_calls_whose_failure_the_model_catches() -> None:
    x = torch.randn(2, 4)
    model = torch.nn.Sequential(Tries(False)).eval()
    assert backquant.quantize(model, x, calibration=[x], slower="keep").report.coverage == 1.0
    failing = torch.nn.Sequential(Tries(True)).eval()
    with pytest.raises(backquant.CaptureError, match=r"module '0.blocks.1'") as raised:
        backquant.quantize(failing, x, calibration=[x], capture="trace")
    assert "['0.blocks.1']" in str(raised.value.fix)
