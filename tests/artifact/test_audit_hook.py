"""Files are loaded and called where nothing compiles, writes files, starts processes or reaches a network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.api.parts.test_quantize import Chosen, data, made
from torch import nn

import backquant
from backquant.qconfig import QConfigMapping, float_qparams_weight_only_qconfig_4bit

CHILD = r"""
import sys
sys.path.append("tests")
import torch, backquant
import backquant.backend_config, backquant.lower, backquant.runtime

path, other, inputs, wanted = sys.argv[1:]
inputs, wanted = torch.load(inputs), torch.load(wanted)
load = backquant.load
if path.endswith("parts"):
    from tests.api.parts.test_quantize import Chosen

    def load(folder):
        torch.manual_seed(0)
        return backquant.load_parts(Chosen().eval(), folder)

load(other)(*inputs)  # modules are imported at first use, and dataclasses compile
seen, allowed = [], []
flat = torch.utils._pytree.tree_leaves

def hook(event, args):
    if not allowed:
        return
    if event in ("exec", "compile", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork",
                 "socket.connect", "socket.bind", "ctypes.dlopen", "os.remove", "os.rename", "os.mkdir"):
        seen.append((event, str(args)[:200]))
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append((event, str(args)[:200]))

sys.addaudithook(hook)
allowed.append(True)
loaded = load(path)
results = [loaded(*(x.clone() for x in inputs)) for _ in range(4)]
allowed.clear()
assert not seen, seen
for result in results:
    for one, two in zip(flat(result), flat(wanted), strict=True):
        assert torch.equal(one, two), (one, two)
print("well")
"""


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(x))
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(y, 1), 1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(x)
        return self.fc(y[:, -1])


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.table(codes).mean(1)


FOUR_BITS = QConfigMapping().set_object_type(nn.Embedding, float_qparams_weight_only_qconfig_4bit)
KINDS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, dict[str, Any]]] = {
    "images": (Images, torch.rand(2, 3, 8, 8), {"backend": "x86"}),
    "a batch": (Images, torch.rand(16, 3, 8, 8), {"backend": "qnnpack"}),
    "reference": (Images, torch.rand(2, 3, 8, 8), {"backend": "tensorrt"}),
    "lstm": (Words, torch.rand(2, 5, 8), {"backend": "fbgemm"}),
    "attention": (attention, torch.rand(2, 5, 8), {"backend": "x86"}),
    "linear layers of four bits": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)),
        torch.rand(2, 64),
        {"weights": "int4", "group_size": 32},
    ),
    "four bits": (
        Codes,
        torch.randint(0, 20, (2, 5)),
        {"backend": "fbgemm", "qconfig_mapping": FOUR_BITS},
    ),
}


def _check_child(*files: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *files],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "well\n", done.stderr[-2000:]


@pytest.mark.parametrize("kind", KINDS)
def test_load_and_call_compile_and_write_nothing(kind: str, tmp_path: Path) -> None:
    """After another file of the same kind, whose modules have other names and other weights."""
    layer, x, options = KINDS[kind]
    files = {name: str(tmp_path / name) for name in ("m.bq", "other.bq", "x.pt", "y.pt")}
    given = {"example_inputs": x} if "weights" in options else {"calibration": [x]}
    model = backquant.quantize(layer().eval(), **given, **options)
    backquant.save(model, files["m.bq"])
    other = backquant.quantize(nn.Sequential(layer()).eval(), **given, **options)
    backquant.save(other, files["other.bq"])
    torch.save((x,), files["x.pt"])
    torch.save(model(x), files["y.pt"])
    _check_child(*files.values())


def test_files_in_parts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = made(Chosen().eval())
    for name in ("parts", "other.parts"):
        backquant.save_parts(found, tmp_path / name)
    x = data(1)[0]
    torch.save((x,), tmp_path / "x.pt")
    torch.save(tuple(found(x)), tmp_path / "y.pt")
    _check_child(*(str(tmp_path / name) for name in ("parts", "other.parts", "x.pt", "y.pt")))
