"""Names of a model stand in files of other runtimes as texts, and say nothing there.

A model under hostile names and one under plain ones give files of the same operators, whose results have the
same bits; what reads a file sees each name whole, or not at all.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.executorch.target import read_back
from backquant.deploy.session import load_exported

NAMES = [
    '"/><layer id="9" type="Parameter" name="x',
    '<!DOCTYPE x [<!ENTITY a "b">]>&a;]]>',
    'in\n"; system("id"); //',
    "µ",
    "μ",
    "\u202e%n\x00\x1b[2J",
    "*/ #include <",
]
PLAIN = [f"plain{place}" for place in range(len(NAMES))]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 0.2


class Model(nn.Module):
    """A layer and a factor for each name."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.names = names
        self.heads = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
        self.factors = nn.ParameterDict({name: nn.Parameter(torch.rand(1)) for name in names})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.relu(self.heads[name](x)) * self.factors[name] for name in self.names}


class Chain(Model):
    """One after the other: AOTInductor's own fusion of the branches above is wrong, and refused."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = torch.relu(self.heads[name](x)) * self.factors[name]
        return x


def _file(names: list[str], backend: str, path: Path) -> list[Any]:
    kind = Chain if path.suffix == ".pt2" else Model
    quantized = backquant.quantize(kind(names).eval(), backend=backend, calibration=[X])
    shapes = {"x": {0: "batch<=8"}}
    backquant.export(quantized, path, example_inputs=(X,), dynamic_shapes=shapes)
    loaded = load_exported(path, 1)
    assert set(loaded.inputs) <= {"x"}
    return loaded.run([X.numpy()])


def _onnx_parts(path: Path) -> Counter[str]:
    graph = onnx.load(path).graph
    return Counter([node.op_type for node in graph.node] + ["input"] * len(graph.input))


def _openvino_parts(path: Path) -> Counter[str]:
    """By a reader of XML that is not OpenVINO's."""
    return Counter(f"{e.tag} {e.get('type')}" for e in ElementTree.parse(path).iter())


def _executorch_parts(path: Path) -> Counter[str]:
    found = read_back(path.read_bytes())
    return Counter([node.kind for delegate in found.delegates for node in delegate])


def _package_parts(path: Path) -> Counter[str]:
    with zipfile.ZipFile(path) as package:
        names = [Path(name) for name in package.namelist()]
    assert not any(part in ("..", "") or part.startswith("/") for n in names for part in n.parts)
    return Counter(name.suffix for name in names)


def _check(backend: str, parts: Any, odd: Path, names: int) -> None:
    plain = odd.with_stem("plain")
    results = _file(NAMES[:names], backend, odd), _file(PLAIN[:names], backend, plain)
    for one, two in zip(*results, strict=True):
        assert np.array_equal(torch.as_tensor(one).numpy(), torch.as_tensor(two).numpy())
    assert parts(odd) == parts(plain)
    assert sum(parts(odd).values()) > 3
    assert {file.stem for file in odd.parent.iterdir()} == {"odd", "plain"}


def test_names_are_texts_in_onnx(tmp_path: Path) -> None:
    _check("onnxruntime", _onnx_parts, tmp_path / "odd.onnx", len(NAMES))


def test_names_are_texts_in_xml(tmp_path: Path) -> None:
    _check("openvino", _openvino_parts, tmp_path / "odd.xml", len(NAMES))


@pytest.mark.parametrize(
    ("backend", "suffix", "parts"),
    [("xnnpack", ".pte", _executorch_parts), ("inductor_x86", ".pt2", _package_parts)],
)
def test_names_are_texts_in_programs(backend: str, suffix: str, parts: Any, tmp_path: Path) -> None:
    _check(backend, parts, tmp_path / f"odd{suffix}", 3)
