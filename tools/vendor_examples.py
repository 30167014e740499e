"""The descriptions of ``examples/backends`` on stock models: the table of docs/vendors.md.

    python -m tools.vendor_examples          # writes the table

Weights are random; batch norms have the statistics of eight random images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401 - torchvision's operators
import torch
import torchvision
import transformers
from torch import nn

import backquant

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "vendors.md"
BACKENDS = ("ethos_u55", "ti_tidl", "qualcomm_htp", "esp32_p4", "nxp_neutron", "intel_gaudi2")
MODELS = ("resnet18", "mobilenet_v3_small", "BertModel")
_TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """``share`` of the multiply-adds that is quantized; ``sqnr`` to the float model, in dB."""

    backend: str
    model: str
    share: float
    sqnr: float

    def __str__(self) -> str:
        return f"| `{self.backend}` | {self.model} | {100 * self.share:.1f} % | {self.sqnr:.1f} |"


def backend(name: str) -> backquant.BackendConfig:
    return backquant.BackendConfig.load(ROOT / "examples" / "backends" / f"{name}.yaml")


@cache
def model(name: str) -> tuple[Any, tuple[torch.Tensor, ...], torch.Tensor]:
    """The model, its input, and what it gives for it."""
    torch.manual_seed(0)
    if name == "BertModel":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
        config = transformers.BertConfig(num_hidden_layers=1, num_attention_heads=4, **sizes)
        made: nn.Module = transformers.BertModel(config).eval()
        inputs = (torch.randint(0, 100, (1, 16)), torch.ones(1, 16, dtype=torch.long))
        with torch.no_grad():
            wanted = made(*inputs).last_hidden_state
        return made, inputs, wanted
    made = getattr(torchvision.models, name)()
    images = torch.randn(8, 3, 64, 64)
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        made.train()(images)
        return made.eval(), (images[:1],), made(images[:1])


def quantized(backend_name: str, model_name: str) -> Any:
    made, inputs, _ = model(model_name)
    return backquant.quantize(made, inputs, backend=backend(backend_name), calibration=[inputs])


def row(backend_name: str, model_name: str) -> Row:
    made = quantized(backend_name, model_name)
    _, inputs, wanted = model(model_name)
    with torch.no_grad():
        found = made(*inputs)
    found = found if isinstance(found, torch.Tensor) else found["last_hidden_state"]
    noise = (wanted - found).square().sum()
    sqnr = 10 * torch.log10(wanted.square().sum() / noise)
    return Row(backend_name, model_name, made.report.coverage, float(sqnr))


def stated() -> dict[tuple[str, str], tuple[str, float]]:
    """What the page says, by backend and model."""
    [text] = _TABLE.findall(PAGE.read_text(encoding="utf-8"))
    cells = re.findall(r"\| `(\w+)` \| (\w+) \| ([\d.]+) % \| (-?[\d.]+) \|", text)
    return {(one, other): (share, float(sqnr)) for one, other, share, sqnr in cells}


def _lines() -> Iterator[str]:
    yield "| description | model | multiply-adds | SQNR, dB |"
    yield "| --- | --- | --- | --- |"
    for name in BACKENDS:
        yield from (str(row(name, other)) for other in MODELS)


if __name__ == "__main__":
    text = "\n".join(_lines()) + "\n"
    PAGE.write_text(_TABLE.sub(lambda _: text, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(text)
