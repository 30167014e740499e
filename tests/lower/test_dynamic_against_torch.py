"""Dynamic and weight-only models beside torch's ``convert_fx`` on four engines, bit for bit."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
from torch import nn
from torch.ao.quantization.backend_config import (
    get_fbgemm_backend_config,
    get_onednn_backend_config,
    get_qnnpack_backend_config,
)
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.nn import functional as F

import backquant.qconfig as bq

TORCH_BACKENDS = {
    "x86": get_x86_backend_config,
    "onednn": get_onednn_backend_config,
    "fbgemm": get_fbgemm_backend_config,
    "qnnpack": get_qnnpack_backend_config,
}


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 8, **options)
        self.fc = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, x):
        y, state = self.rnn(x)
        return self.fc(y), state


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8)
        self.gru = nn.GRU(8, 8)

    def forward(self, x, h, c):
        y, (h, c) = self.lstm(x, (h, c))
        return self.gru(y, h), h, c


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(6, 8)
        self.gru = nn.GRUCell(8, 8)
        self.tanh = nn.RNNCell(8, 8)
        self.relu = nn.RNNCell(8, 8, nonlinearity="relu")

    def forward(self, x):
        h, c = self.lstm(x)
        h, c = self.lstm(x, (h, c))
        return self.relu(self.tanh(self.gru(h, c))), h


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))
        self.bias = nn.Parameter(torch.randn(5))
        self.square = nn.Parameter(torch.randn(5, 5))
        self.relu = nn.ReLU()

    def forward(self, x):
        y = self.relu(F.linear(x, self.weight, self.bias))
        return F.linear(F.relu(F.linear(y, self.square)), self.square, bias=self.bias)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.bag = nn.EmbeddingBag(20, 6, mode="sum")
        self.last = nn.EmbeddingBag(20, 6, mode="sum", include_last_offset=True)

    def forward(self, indices, offsets, weights):
        bags = self.bag(indices, offsets, weights)
        last = self.last(indices, torch.cat([offsets, offsets.new_tensor([9])]))
        return self.table(indices), bags, last


def _linear(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *more, nn.Linear(8, 4))


STEP, SEQUENCE = (3, 6), (5, 3, 6)
DYNAMIC = {
    "linear": (_linear, [STEP]),
    "linear_relu": (lambda: _linear(nn.ReLU()), [STEP]),
    "linear_of_three_dimensions": (lambda: _linear(nn.ReLU()), [SEQUENCE]),
    "linear_batch_norm": (lambda: _linear(nn.BatchNorm1d(8), nn.ReLU()), [STEP]),
    "functional": (Functional, [STEP]),
    "lstm": (lambda: Recurrent(nn.LSTM), [SEQUENCE]),
    "lstm_of_two_layers": (lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.5), [SEQUENCE]),
    "lstm_bidirectional": (
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
        [SEQUENCE],
    ),
    "gru": (lambda: Recurrent(nn.GRU), [SEQUENCE]),
    "gru_bidirectional": (
        lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True, batch_first=True),
        [SEQUENCE],
    ),
    "states": (Stateful, [SEQUENCE, (1, 3, 8), (1, 3, 8)]),
    "cells": (Cells, [STEP]),
}


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)]


def _same(one: Any, two: Any) -> bool:
    pairs = zip(_flat(one), _flat(two), strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def _theirs(model: nn.Module, example: tuple[Any, ...], qconfig: str, engine: str) -> nn.Module:
    mapping = tq.QConfigMapping().set_global(getattr(tq.qconfig, qconfig))
    backend = TORCH_BACKENDS[engine]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(copy.deepcopy(model).eval(), mapping, example, backend_config=backend)
        return convert_fx(prepared, backend_config=backend)


@pytest.fixture(params=TORCH_BACKENDS)
def engine(request):
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = request.param
    yield request.param
    torch.backends.quantized.engine = before


def _has_no_kernel(qconfig: str, engine: str) -> bool:
    return "float16" in qconfig and engine in ("qnnpack", "onednn")


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize(
    "qconfig", ["default_dynamic_qconfig", "per_channel_dynamic_qconfig", "float16_dynamic_qconfig"]
)
def test_dynamic_models(flow, engine, name, qconfig):
    make, shapes = DYNAMIC[name]
    model, example = make(), tuple(torch.randn(shape) for shape in shapes)
    mapping = bq.QConfigMapping().set_global(getattr(bq, qconfig))
    with torch.no_grad():
        reference, lowered = flow(model, example, mapping, engine)
        graph = lowered.graph_module
        if _has_no_kernel(qconfig, engine):
            assert lowered.kernels == ()
            assert {r.rule for r in lowered.left_in_float} <= {
                "float-in-reference",  # neither admits it
                "float-input",
            }
            assert _same(graph(*example), reference(*example))
            return
        theirs = _theirs(model, example, qconfig, engine)
        for _ in range(3):
            inputs = tuple(torch.randn(shape) for shape in shapes)
            assert _same(graph(*inputs), theirs(*inputs))
            pairs = zip(_flat(graph(*inputs)), _flat(reference(*inputs)), strict=True)
            assert all(torch.allclose(a, b, atol=0.15) for a, b in pairs)
    assert lowered.left_in_float == ()
    assert not any("quantize" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize(
    "qconfig", ["float_qparams_weight_only_qconfig", "float_qparams_weight_only_qconfig_4bit"]
)
def test_embeddings(flow, engine, qconfig):
    example = (torch.randint(0, 20, (9,)), torch.tensor([0, 4, 4]), torch.rand(9))
    model = Embeddings()
    mapping = bq.QConfigMapping().set_global(getattr(bq, qconfig))
    with torch.no_grad():
        _, lowered = flow(model, example, mapping, engine)
        # PyTorch's onednn claims qint8 tables alone, which no kernel takes; tables are all engines'
        theirs = _theirs(model, example, qconfig, "fbgemm" if engine == "onednn" else engine)
        assert _same(lowered.graph_module(*example), theirs(*example))
    assert len(lowered.kernels) == 3


def test_the_kernels_do_not_read_the_process_wide_engine(flow):
    model, x = _linear(nn.ReLU()), torch.randn(STEP)
    mapping = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig)
    before = torch.backends.quantized.engine
    with torch.no_grad():
        graphs = {e: flow(model, (x,), mapping, e)[1].graph_module for e in ("fbgemm", "qnnpack")}
        expected = {e: graph(x) for e, graph in graphs.items()}
        for other in torch.backends.quantized.supported_engines:
            torch.backends.quantized.engine = other
            assert all(torch.equal(graph(x), expected[e]) for e, graph in graphs.items())
    torch.backends.quantized.engine = before
    assert not torch.equal(expected["fbgemm"], expected["qnnpack"])  # 7 bits and 8
