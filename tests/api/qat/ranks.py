"""What one rank of ``test_distributed`` does; started by ``torch.multiprocessing.spawn``."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.ao.quantization as tq
import torch.distributed as dist
from torch import nn
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config
from torch.ao.quantization.quantize_fx import prepare_qat_fx
from torch.nn.parallel import DistributedDataParallel

import backquant

SHAPE = (4, 3, 8, 8)
RANKS = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(self.stem(x).mean([2, 3]))


def prepared(observer: str = "") -> Any:
    """``observer``: the name of one that is not the default."""
    torch.manual_seed(0)
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    if observer:
        measure = getattr(backquant, observer)
        per_channel = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}
        fake = backquant.FakeQuantize.with_args(observer=measure, quant_min=0, quant_max=127)
        weight = backquant.FakeQuantize.with_args(
            observer=backquant.PerChannelMinMaxObserver, dtype=torch.qint8, **per_channel
        )
        mapping = backquant.QConfigMapping().set_global(backquant.QConfig(fake, weight))
    return backquant.prepare_qat_fx(
        Net(),
        mapping,
        torch.zeros(SHAPE),
        backend_config=backquant.backend_config.get_x86_backend_config(),
    )


def torch_prepared() -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prepare_qat_fx(
            Net(),
            tq.get_default_qat_qconfig_mapping("x86"),
            (torch.zeros(SHAPE),),
            backend_config=get_x86_backend_config(),
        )


def batch(step: int, rank: int) -> torch.Tensor:
    """Every rank sees data of its own; those of rank 1 have the wider range."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SHAPE, generator=generator) * (1 + 2 * rank)


def train(model: nn.Module, rank: int, steps: int = 6) -> list[torch.Tensor]:
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        y = wrapped(batch(step, rank))
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).mean().backward()
        optimizer.step()
        found.append(y.detach())
    return found


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def run(rank: int, folder: str) -> None:
    """Train, synchronize, convert; everything that the test looks at goes into a file per rank."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=2)
    )
    found: dict[str, Any] = {}
    for observer in ("", "MinMaxObserver", "HistogramObserver"):
        model = prepared(observer)
        outputs = train(model, rank, steps=2 if observer == "HistogramObserver" else 6)
        part = found[observer or "default"] = {"outputs": outputs, "before": buffers(model)}
        part["parameters"] = {n: p.detach().clone() for n, p in model.named_parameters()}
        backquant.api.synchronize_observers(model)
        part["after"] = buffers(model)
        reference = backquant.convert_to_reference_fx(model, dialect="decomposed")
        part["code"], part["state"] = reference.code, dict(reference.state_dict())
        x = batch(99, 0)
        part["converted"] = (reference(x), backquant.convert_fx(model)(x))
    found["torch"] = train(torch_prepared(), rank)
    found["refused"] = _refused(rank)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def _refused(rank: int) -> str:
    """The error of ranks that prepared models with different buffers."""
    try:
        backquant.api.synchronize_observers(prepared("HistogramObserver" if rank else ""))
    except backquant.UsageError as error:
        return str(error)
    return ""
