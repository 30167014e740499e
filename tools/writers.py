"""Everything of the package that writes files, each as a function of the name to write.

Shared by ``kill_moments.py`` and ``write_faults.py``.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import backquant
from backquant.backend_config import BackendConfig
from backquant.cli import main as command

EXAMPLE = torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)
BACKENDS = {  # by target
    "onnx": "onnxruntime",
    "openvino": "openvino",
    "tensorrt": "tensorrt",
    "qdq-onnx": "onnxruntime",
    "executorch": "xnnpack",
    "pt2e": "executorch",
    "inductor": "inductor_x86",
}
SUFFIXES = {  # of the files that each writes; the first is of the name that is passed
    "save": (".bq",),
    "quantize -o": (".bq", ".html"),
    "onnx": (".onnx",),
    "openvino": (".xml", ".bin"),
    "tensorrt": (".onnx",),
    "qdq-onnx": (".onnx",),
    "executorch": (".pte",),
    "pt2e": (".pt2",),
    "report": (".html",),
    "description": (".yaml",),
    "quantize_files": (".bq",),
    "migrate": (".py",),
    "sensitivity": (".json", ".html"),
    "checkpoint": (),
    "inductor": (".pt2",),
    "compile": (),
}
OLD = {  # what stands in the files before; else any bytes do
    "migrate": b"from torch.ao.quantization import get_default_qconfig_mapping\n",
    "sensitivity": None,  # no files: one that is there is read, and gone on from
}
SLOW = ("inductor", "compile")  # a C++ compiler, some 20 s


def factory() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), EXAMPLE


def data() -> list[torch.Tensor]:
    return [EXAMPLE]


def spoken(*words: str) -> None:
    """What the command line does with ``words``."""
    sys.argv = ["backquant", *words]
    command()


def quantized(backend: str) -> backquant.QuantizedModel:
    return backquant.quantize(factory()[0], backend=backend, calibration=data(), slower="keep")


def quantize(path: Path) -> None:
    named = f"{__name__}:factory --data {__name__}:data --slower keep -f --json"
    spoken("quantize", *named.split(), "-o", str(path), "--html", str(path.with_suffix(".html")))


def sensitivity(path: Path) -> None:
    named = f"{__name__}:factory --data {__name__}:data --json"
    page = str(path.with_suffix(".html"))
    spoken("sensitivity", *named.split(), "--resume", str(path), "--html", page)


def checkpoint(path: Path) -> None:
    kept = backquant.Checkpoint(path.parent, every=1)
    backquant.quantize(
        factory()[0], backend="x86", calibration=data(), slower="keep", checkpoint=kept
    )


def migrate(path: Path) -> None:
    spoken("migrate", str(path))


def exporter(target: str) -> Callable[[Path], object]:
    model = quantized(BACKENDS[target])
    return lambda path: backquant.export(model, path, to=target, overwrite=True)


def from_files() -> Callable[[Path], object]:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    weights = folder / "model.safetensors"
    save_file(factory()[0].state_dict(), weights)

    def model() -> nn.Module:
        return factory()[0]

    return lambda path: backquant.quantize_files(
        model, weights, path, EXAMPLE, calibration=data(), backend="x86"
    )


def writer(kind: str) -> Callable[[Path], object]:
    """A function that writes the name that it is given."""
    if kind in BACKENDS:
        return exporter(kind)
    if kind == "quantize_files":
        return from_files()
    plain: dict[str, Callable[[Path], object]] = {
        "quantize -o": quantize,
        "description": lambda path: BackendConfig("mine").save(path),
        "sensitivity": sensitivity,
        "checkpoint": checkpoint,
        "migrate": migrate,
    }
    if kind in plain:
        return plain[kind]
    model = quantized("x86")
    return {
        "save": lambda path: backquant.save(model, path),
        "report": model.report.save_html,
        "compile": lambda _: model.compile(EXAMPLE),
    }[kind]
