"""Models of a few layers, each with inputs and what PyTorch is asked to quantize."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization as tq
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import backquant as bq

Inputs = tuple[torch.Tensor, ...]


def image(*shape: int) -> Callable[[], Inputs]:
    return lambda: (torch.randn(*shape),)


class Functional(nn.Module):
    """Weights that are passed to functions; one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.offset = (
            nn.Parameter(torch.randn(4, 3, 3, 3)),
            nn.Parameter(torch.randn(4)),
        )
        self.part = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.conv2d(x, self.kernel, self.offset, (1, 1), (1, 1), (1, 1), 1))
        x = F.relu(F.linear(x.mean((2, 3)), self.part.weight, self.part.bias))
        return F.linear(x, self.part.weight)


class Residual(nn.Module):
    """A fused convolution, a skip connection, entries that share an observer, fixed qparams, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.more, self.pool = nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1)
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        x = torch.cat([self.more(x) + x, x * x], 1)
        return torch.sigmoid(F.linear(self.pool(x).flatten(1), self.weight))


class Tables(nn.Module):
    """An embedding and a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 6)
        self.bag = nn.EmbeddingBag(10, 6, mode="sum", include_last_offset=True)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.rows(indices).sum(0) + self.bag(indices, offsets).sum(0)


class Recurrent(nn.Module):
    """Recurrent layers one after the other; ``cells``: single steps as well."""

    def __init__(self, *, cells: bool = False) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 4, 2, bidirectional=True), nn.GRU(8, 4)
        self.cell, self.unit = (nn.LSTMCell(4, 4), nn.GRUCell(4, 4)) if cells else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.gru(self.lstm(x)[0])[0]
        return x if self.cell is None else self.unit(self.cell(x[0])[0])


class StaticLSTM(nn.Module):
    """An LSTM whose gates are quantized one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


@dataclass(frozen=True)
class Case:
    """``backend`` names the engine; ``qconfig``: for all layers, in place of the backend's default."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    backend: str = "x86"
    qconfig: Any = None

    def mapping(self) -> tq.QConfigMapping:
        if self.qconfig is not None:
            return tq.QConfigMapping().set_global(self.qconfig)
        return tq.get_default_qconfig_mapping(self.backend)


def _layers(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


_DYNAMIC, _HALF = tq.default_dynamic_qconfig, tq.float16_dynamic_qconfig
_ROWS = lambda: (torch.arange(6), torch.tensor([0, 3, 6]))  # noqa: E731
CASES: dict[str, Case] = {
    "conv1d": Case(_layers(lambda: nn.Conv1d(3, 4, 3), nn.ReLU), image(2, 3, 8)),
    "conv2d": Case(_layers(lambda: nn.Conv2d(3, 4, 3)), image(2, 3, 6, 6)),
    "conv2d, no bias, groups": Case(
        _layers(lambda: nn.Conv2d(4, 4, 3, groups=2, bias=False)), image(2, 4, 6, 6)
    ),
    "conv2d, batch norm, relu": Case(
        _layers(lambda: nn.Conv2d(3, 4, 3), lambda: nn.BatchNorm2d(4), nn.ReLU), image(2, 3, 6, 6)
    ),
    "conv3d": Case(_layers(lambda: nn.Conv3d(3, 4, 3), nn.ReLU), image(2, 3, 5, 5, 5)),
    "transposed 1d": Case(_layers(lambda: nn.ConvTranspose1d(3, 4, 3)), image(2, 3, 8)),
    "transposed 2d": Case(_layers(lambda: nn.ConvTranspose2d(3, 4, 3)), image(2, 3, 6, 6)),
    "transposed 3d": Case(_layers(lambda: nn.ConvTranspose3d(3, 4, 3)), image(2, 3, 4, 4, 4)),
    "linear": Case(_layers(lambda: nn.Linear(8, 4)), image(3, 8)),
    "linear, relu": Case(_layers(lambda: nn.Linear(8, 4), nn.ReLU), image(3, 8)),
    "batch norm": Case(_layers(lambda: nn.BatchNorm2d(3), nn.ReLU), image(2, 3, 6, 6)),
    "norms and activations": Case(
        _layers(
            lambda: nn.GroupNorm(2, 4),
            lambda: nn.InstanceNorm1d(4, affine=True),
            nn.Hardswish,
            nn.LeakyReLU,
            lambda: nn.LayerNorm(8),
        ),
        image(2, 4, 8),
    ),
    "functional": Case(Functional, image(2, 3, 6, 6)),
    "residual": Case(Residual, image(2, 2, 8, 8)),
    "residual, qnnpack": Case(Residual, image(2, 2, 8, 8), "qnnpack"),
    "linear, qnnpack": Case(_layers(lambda: nn.Linear(8, 4), nn.ReLU), image(3, 8), "qnnpack"),
    "dynamic linear": Case(
        _layers(lambda: nn.Linear(8, 4), nn.ReLU, lambda: nn.Linear(4, 2)),
        image(3, 8),
        qconfig=_DYNAMIC,
    ),
    "dynamic functional": Case(Functional, image(2, 3, 6, 6), qconfig=_DYNAMIC),
    "dynamic recurrent": Case(Recurrent, image(5, 2, 4), qconfig=_DYNAMIC),
    "dynamic cells": Case(lambda: Recurrent(cells=True), image(5, 2, 4), qconfig=_DYNAMIC),
    "half linear": Case(_layers(lambda: nn.Linear(8, 4)), image(3, 8), qconfig=_HALF),
    "half recurrent": Case(Recurrent, image(5, 2, 4), qconfig=_HALF),
    "tables": Case(Tables, _ROWS, qconfig=tq.float_qparams_weight_only_qconfig),
    "tables of 4 bits": Case(Tables, _ROWS, qconfig=tq.float_qparams_weight_only_qconfig_4bit),
    "static lstm": Case(StaticLSTM, image(5, 2, 4)),
}


@dataclass
class Pair:
    """PyTorch's model, and the batches that it was calibrated with."""

    float_model: nn.Module
    theirs: nn.Module
    batches: list[Inputs]
    mapping: tq.QConfigMapping
    backend: str

    def ours(self, *, calibrated: bool, backend: str | None = None) -> bq.QuantizedModel:
        """Prepared and converted anew; with other batches, if calibrated."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # observers without data
            name = self.backend if backend is None else backend
            config = bq.get_backend_config(name)
            mapping = bq.from_torch_ao(self.mapping)
            prepared = bq.prepare_fx(
                self.float_model, mapping, self.batches[0], backend_config=config
            )
            if calibrated:
                prepared(*(3 * x + 1 if x.is_floating_point() else x for x in self.batches[0]))
            return bq.convert_fx(prepared)


def pair(case: Case) -> Pair:
    """``case`` calibrated and converted by ``torch.ao``."""
    torch.manual_seed(0)
    model, mapping = case.model().eval(), case.mapping()
    batches = [case.inputs() for _ in range(3)]
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = case.backend
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = prepare_fx(copy.deepcopy(model), mapping, batches[0])
            for batch in batches:
                prepared(*batch)
            theirs = convert_fx(prepared)
    finally:
        torch.backends.quantized.engine = engine
    return Pair(model, theirs, batches, mapping, case.backend)
