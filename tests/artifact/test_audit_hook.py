"""Files are loaded and called where nothing compiles, writes files, starts processes or reaches a network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.qconfig import QConfigMapping, float_qparams_weight_only_qconfig_4bit

CHILD = r"""
import sys
import torch, backquant
import backquant.backend_config, backquant.lower, backquant.runtime

path, other, inputs, wanted = sys.argv[1:]
inputs, wanted = torch.load(inputs), torch.load(wanted)
backquant.load(other)(*inputs)  # modules are imported at first use, and dataclasses compile
seen, allowed = [], []

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
loaded = backquant.load(path)
results = [loaded(*(x.clone() for x in inputs)) for _ in range(4)]
allowed.clear()
assert not seen, seen
for result in results:
    assert torch.equal(result, wanted), (result, wanted)
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
    "four bits": (
        Codes,
        torch.randint(0, 20, (2, 5)),
        {"backend": "fbgemm", "qconfig_mapping": FOUR_BITS},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_load_and_call_compile_and_write_nothing(kind: str, tmp_path: Path) -> None:
    """After another file of the same kind, whose modules have other names and other weights."""
    layer, x, options = KINDS[kind]
    files = {name: str(tmp_path / name) for name in ("m.bq", "other.bq", "x.pt", "y.pt")}
    model = backquant.quantize(layer().eval(), calibration=[x], **options)
    backquant.save(model, files["m.bq"])
    other = backquant.quantize(nn.Sequential(layer()).eval(), calibration=[x], **options)
    backquant.save(other, files["other.bq"])
    torch.save((x,), files["x.pt"])
    torch.save(model(x), files["y.pt"])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *files.values()], capture_output=True, text=True, check=False
    )
    assert done.stdout == "well\n", done.stderr[-2000:]
