"""``.pt2`` packages: the kernels in the generated code, and what the package computes."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.inductor import TARGET
from backquant.errors import EngineError, ExportError
from backquant.graph.silence import quiet
from backquant.runtime.compiled.inductor import check_compiler
from experts import Experts

FAST = {"inductor_configs": {"aot_inductor.compile_wrapper_opt_level": "O0"}}


class Tiny(nn.Module):
    """A residual addition, and what Inductor overlooks by itself: a convolution that is called twice, linear
    layers with one transposed input, a batch norm over flattened rows; a weight that it packs wrongly, and a
    1-d convolution whose shape it computes wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)  # 8 rows to 4; Inductor drops the mode
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.gate, self.fc, self.norm = nn.Linear(8, 12), nn.Linear(8, 12), nn.BatchNorm1d(12)
        self.line = nn.Sequential(nn.Conv1d(8, 8, 3, 2, padding=1), nn.GroupNorm(2, 8))
        self.stored_transposed = nn.Parameter(torch.randn(12, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x))
        x = self.body(torch.relu(self.body(x) + x)).flatten(2)
        x = self.line(x).transpose(1, 2)
        y = self.fc(x)
        y = self.norm(y.flatten(0, 1)).reshape_as(y) * self.gate(x)
        return torch.mm(y.mean(1), self.stored_transposed)


class Attention(nn.Module):
    """Three linear layers on one input, which a quantized residual addition reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        query, key, value = self.query(x), self.key(x), self.value(x)
        scores = torch.softmax(query @ key.transpose(-1, -2), -1)
        return torch.relu(self.out(scores @ value) + x)


def test_convolutions_and_dynamic_batch(tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = backquant.quantize(Tiny().eval(), backend="inductor_x86", calibration=[x])
    path = tmp_path / "m.pt2"
    shapes = {"x": {0: "batch"}}
    exported = backquant.export(model, path, example_inputs=x, dynamic_shapes=shapes, options=FAST)
    assert exported.integer_share == 1.0
    found = Counter(use.kernel.split("_")[0] for use in exported.kernels if use.integer)
    assert found == {"qconv": 3, "qconv2d": 1, "qlinear": 3}
    nodes = [use.nodes for use in exported.kernels if use.integer]
    assert nodes[:4] == [("stem_0",), ("body",), ("body_1",), ("line_0",)]
    assert set(nodes[4:]) == {("fc",), ("gate",), ("linear",)}
    with quiet():
        run = torch._inductor.aoti_load_package(str(path))
        for batch in (1, 4, 7):
            x = torch.randn(batch, 3, 8, 8)
            torch.testing.assert_close(run(x), model(x), rtol=0, atol=0.02)


def test_every_linear_layer_of_an_attention_becomes_a_kernel(tmp_path) -> None:
    """Also those that share their input with a residual addition, which Inductor overlooks by itself."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    config = backquant.get_backend_config("inductor_x86").set_qdq(None)  # the addition is quantized
    model = backquant.quantize(Attention().eval(), backend=config, calibration=[x])
    exported = backquant.export(model, tmp_path / "m.pt2", example_inputs=x, options=FAST)
    linear = {n for use in exported.kernels if use.integer for n in use.nodes}
    assert linear >= {"stem", "query", "key", "value", "out"}
    with quiet():
        [found] = TARGET.loaded(tmp_path / "m.pt2").run([x.numpy()])
    torch.testing.assert_close(torch.as_tensor(found), model(x), rtol=0, atol=0.02)


class Residual(nn.Module):
    """Additions with the linear layer on the right, and of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.left, self.right, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.narrow(torch.relu(self.wide(x))))
        return self.head(self.norm2(self.left(x) + self.right(x)))


def test_kernels_with_an_addition_are_named_after_their_linear_layer(tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    model = backquant.quantize(Residual().eval(), backend="inductor_x86", calibration=[x])
    exported = backquant.export(model, tmp_path / "m.pt2", example_inputs=x, options=FAST)
    found = [(*use.nodes, "binary" in use.kernel) for use in exported.kernels if use.integer]
    assert {name for name, _ in found} == {"wide", "narrow", "left", "right", "head"}
    assert len(found) == 5
    assert ("narrow", True) in found
    assert sum(added for _, added in found) == 2
    assert exported.integer_share == 1.0


def test_without_a_compiler(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(EngineError, match="no C\\+\\+ compiler"):
        check_compiler()
    model = backquant.quantize(
        nn.Linear(4, 4), backend="inductor_x86", calibration=[torch.randn(8, 4)]
    )
    with pytest.raises(EngineError, match="apt-get install"):
        backquant.export(model, tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_the_compiler_s_own_failure_is_ours(tmp_path) -> None:
    model = backquant.quantize(
        nn.Linear(4, 4), backend="inductor_x86", calibration=[torch.randn(8, 4)]
    )
    with pytest.raises(ExportError, match="AOTInductor cannot compile"):
        options = {"inductor_configs": {"no_such_setting": 1}}
        backquant.export(model, tmp_path / "m.pt2", options=options)
    assert list(tmp_path.iterdir()) == []


def test_activations_are_in_the_kernels(tmp_path) -> None:
    """What stays float between a kernel and a quantize node is the kernel's own."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 1), nn.Hardswish()),
        *(nn.Conv2d(16, 16, 1), nn.Flatten(), nn.Linear(256, 16), nn.GELU(), nn.Linear(16, 4)),
    ).eval()
    batches = [torch.randn(2, 3, 6, 6) for _ in range(3)]
    quantized = backquant.quantize(model, backend="inductor_x86", calibration=batches)
    path = tmp_path / "model.pt2"
    backquant.export(quantized, path, options=FAST)
    with zipfile.ZipFile(path) as package:
        code = "".join(
            package.read(name).decode()
            for name in package.namelist()
            if name.endswith(".wrapper.cpp")
        )
    calls = re.findall(r"aoti_torch_cpu__(qconv|qlinear)_pointwise_tensor\(.*", code)
    lines = [line for line in code.splitlines() if "aoti_torch_cpu__q" in line]
    assert len(calls) == 5
    for activation in ("swish", "hardswish", "gelu"):
        assert sum(f'"{activation}"' in line for line in lines) == 1


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Stepping(nn.Module):
    """Takes and gives a named tuple, and more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, state: Pair) -> dict[str, Any]:
        made = Pair(self.first(state.first), self.second(state[1]))
        return {"state": made, "kind": "step", "scale": 0.5, "rest": None, "best": made[0].max(1)}


def test_named_tuples_and_values_that_are_no_tensors(tmp_path: Path) -> None:
    states = [Pair(torch.randn(3, 8), torch.randn(3, 8)) for _ in range(2)]
    options: dict[str, Any] = {"backend": "inductor_x86", "calibration": [(s,) for s in states]}
    quantized = backquant.quantize(Stepping().eval(), (states[0],), slower="keep", **options)
    sizes = {"state": ({0: "batch"}, {0: "batch"})}
    path = tmp_path / "m.pt2"
    exported = backquant.export(quantized, path, dynamic_shapes=sizes, options=FAST)
    assert exported.integer_share == 1.0
    state = Pair(torch.randn(5, 8), torch.randn(5, 8))
    found, wanted = torch._inductor.aoti_load_package(str(path))(state), quantized(state)
    assert list(found) == ["state", "kind", "scale", "rest", "best"]
    assert (found["kind"], found["rest"], found["scale"].item()) == (None, None, 0.5)
    assert torch.allclose(found["state"]["second"], wanted["state"].second, atol=0.1)
    assert torch.allclose(found["best"][0], wanted["best"].values, atol=0.1)


def test_experts_without_an_operator_of_this_package(tmp_path: Path) -> None:
    given = torch.randn(6, 8), torch.tensor([2, 3, 6], dtype=torch.int32)
    options: dict[str, Any] = {"backend": "inductor_x86", "calibration": [given]}
    quantized = backquant.quantize(Experts().eval(), given, slower="keep", **options)
    exported = backquant.export(quantized, tmp_path / "m.pt2", options=FAST)
    assert exported.integer_share == 1.0
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:
        code = [archive.read(n).decode() for n in archive.namelist() if n.endswith(".cpp")]
    assert code and not any("backquant::" in text for text in code)
    found = torch._inductor.aoti_load_package(str(tmp_path / "m.pt2"))(*given)
    assert torch.allclose(found, quantized(*given), atol=0.1)
