"""Decisions about recurrent layers, embeddings and narrower floats, beside PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
import torch.nn.functional as F
from torch import nn

import backquant.qconfig as bq
from against_torch.torch_side import TORCH_BACKENDS
from backquant.backend_config import BackendConfig, DTypeConfig, get_backend_config
from backquant.fuse import plan_fused
from backquant.graph import capture
from backquant.match import Outcome
from backquant.observe import PlaceholderObserver
from backquant.operators import linear
from unkept import as_kept

# Backends whose tables have another dtype than the weight-only QConfigs ask for.
_OTHER_TABLES = ("executorch",)
QCONFIGS = [
    "default_qconfig",
    "default_dynamic_qconfig",
    "per_channel_dynamic_qconfig",
    "float16_dynamic_qconfig",
    "float16_static_qconfig",
    "float_qparams_weight_only_qconfig",
    "float_qparams_weight_only_qconfig_4bit",
]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, 2, bidirectional=True)
        self.gru = nn.GRU(16, 8, batch_first=True)
        self.cells = nn.ModuleList([nn.LSTMCell(8, 8), nn.GRUCell(8, 8), nn.RNNCell(8, 8)])
        self.conv = nn.Conv1d(8, 4, 1)

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        y, _ = self.gru(y)
        z, _ = self.cells[0](y[0])
        z = self.cells[2](self.cells[1](z))
        return self.conv(z.unsqueeze(-1)) + h[0, 0, 0] * c[0, 0, 0]


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.bag = nn.EmbeddingBag(10, 8)
        self.weight = nn.Parameter(torch.randn(10, 8))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1))

    def forward(self, i):
        return self.head(self.table(i).sum(1) + self.bag(i) + F.embedding(i, self.weight).sum(1))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LeakyReLU(), nn.Linear(4, 4), nn.Tanh()
        )
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return F.relu(F.linear(self.layers(x), self.weight)).softmax(-1)


MODELS: dict[str, tuple[Any, Any]] = {
    "recurrent": (Recurrent, torch.randn(3, 2, 4)),
    "embeddings": (Embeddings, torch.tensor([[1, 2], [3, 4]])),
    "dense": (Dense, torch.randn(2, 4)),
}


def _quantized(model: nn.Module, backend: BackendConfig, mapping: bq.QConfigMapping) -> set[str]:
    decisions = plan_fused(capture(model), backend, mapping).plan.decisions
    return {name for name, d in decisions.items() if d.outcome is Outcome.QUANTIZED}


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("qconfig", QCONFIGS)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_decisions_equal(
    observed_by_torch: Any, model_name: str, qconfig: str, backend: str
) -> None:
    make, example = MODELS[model_name]
    model = make().eval()
    theirs = tq.QConfigMapping().set_global(getattr(tq.qconfig, qconfig))
    expected = observed_by_torch(
        model, (example,), theirs, as_kept(backend, TORCH_BACKENDS[backend]())
    )
    ours = bq.QConfigMapping().set_global(getattr(bq, qconfig))
    found = _quantized(model, get_backend_config(backend), ours)
    assert found <= expected
    # PyTorch does not ask what a QConfig wants for the input and weight of an embedding, and leaves it
    # in float when it converts.
    later = {"table", "bag"} if "weight_only" not in qconfig or backend in _OTHER_TABLES else set()
    assert expected - found <= later


_ABOUT = ("lstm", "gru", "cells", "table", "bag", "head", "layers")


def test_what_each_asks_for_is_found() -> None:
    """The comparison above is about something."""
    x86 = get_backend_config("x86")
    for model_name, qconfig, expected in (
        ("recurrent", "default_dynamic_qconfig", {"lstm", "gru", "cells_0", "cells_1", "cells_2"}),
        ("recurrent", "float16_dynamic_qconfig", {"lstm", "gru", "cells_0", "cells_1", "cells_2"}),
        ("recurrent", "default_qconfig", set()),
        ("embeddings", "float_qparams_weight_only_qconfig", {"table", "bag"}),
        ("embeddings", "float_qparams_weight_only_qconfig_4bit", {"table", "bag"}),
        ("embeddings", "default_dynamic_qconfig", {"head_0", "head_2"}),
        ("dense", "float16_static_qconfig", set()),
    ):
        mapping = bq.QConfigMapping().set_global(getattr(bq, qconfig))
        found = _quantized(MODELS[model_name][0]().eval(), x86, mapping)
        assert {name for name in found if name.startswith(_ABOUT)} == expected


def _narrow(dtype: torch.dtype, bias: torch.dtype, dynamic: bool = False) -> BackendConfig:
    config = (
        DTypeConfig(dtype, torch.float, dtype, bias, is_dynamic=True)
        if dynamic
        else DTypeConfig(dtype, dtype, dtype, bias)
    )
    return BackendConfig("custom").set_backend_pattern_configs(linear.single_entries([config]))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return F.linear(self.fc(x), self.weight, self.bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrower_floats(dtype: torch.dtype) -> None:
    """A static request has a bias of the same dtype, as PyTorch's of float16; a dynamic one float32."""
    narrow = PlaceholderObserver.with_args(dtype=dtype)
    static = bq.QConfigMapping().set_global(bq.QConfig(narrow, narrow))
    dynamic = bq.QConfigMapping().set_global(
        bq.QConfig(PlaceholderObserver.with_args(dtype=dtype, is_dynamic=True), narrow)
    )
    both, none = {"fc", "linear"}, set[str]()
    for backend, mapping, expected in (
        (_narrow(dtype, dtype), static, both),
        (_narrow(dtype, torch.float), static, none),
        (_narrow(dtype, torch.float, dynamic=True), dynamic, both),
        (_narrow(dtype, dtype, dynamic=True), dynamic, none),
        (_narrow(dtype, dtype), dynamic, none),
        (_narrow(dtype, torch.float, dynamic=True), static, none),
    ):
        assert _quantized(Both().eval(), backend, mapping) == expected


def test_the_reason_says_that_it_is_about_dynamic_quantization() -> None:
    x86 = get_backend_config("x86")
    model = nn.Sequential(nn.Conv2d(3, 3, 1)).eval()
    mapping = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig)
    [decision] = plan_fused(capture(model), x86, mapping).plan.decisions.values()
    [rule] = {reason.rule for reason in decision.reasons if reason.rule == "dynamic"}
    assert rule == "dynamic"
    assert "static quantization" in str(decision)


def test_items_of_a_recurrent_layer_are_no_operators() -> None:
    x86 = get_backend_config("x86")
    mapping = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig)
    decisions = plan_fused(capture(Recurrent().eval()), x86, mapping).plan.decisions
    outcomes = {name: d.outcome.value for name, d in decisions.items() if "getitem" in name}
    assert list(outcomes.values()).count("not_tensor") == 8
    assert outcomes["getitem"] == "not_tensor"
    picked = [name for name, outcome in outcomes.items() if outcome == "float"]
    assert len(picked) == 3  # y[0], h[0, 0, 0], c[0, 0, 0]
