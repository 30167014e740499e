"""A model that was changed by hand: what it runs, what it loads, and what takes it as it was made."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import UsageError
from backquant.runtime import QuantizedModel

FIX_NAMES = {"pickle": pickle}
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def quantized() -> QuantizedModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    return backquant.quantize(net, X, calibration=[X], slower="keep")


def with_another_bias(quantized: QuantizedModel) -> None:
    layer = quantized.get_submodule("0")
    layer.set_weight_bias(layer.weight(), torch.ones(8))  # type: ignore[operator]


def with_another_graph(quantized: QuantizedModel) -> None:
    output = quantized.graph.output_node()
    quantized.add_submodule("last", nn.Hardtanh(-0.1, 0.1))
    with quantized.graph.inserting_before(output):
        output.args = (quantized.graph.call_module("last", output.args),)
    quantized.recompile()


CHANGES = [with_another_bias, with_another_graph]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_is_not_saved_nor_compiled_as_it_was_before(
    change: Callable[[QuantizedModel], None],
    quantized: QuantizedModel,
    tmp_path: Path,
    snapshot: Callable[..., None],
) -> None:
    """Its kernels are those of the model before the change."""
    path = tmp_path / "model.bq"
    change(quantized)
    with pytest.raises(UsageError, match="as it was made"):
        quantized.compile()
    with pytest.raises(UsageError) as refused:
        quantized.save(path)
    snapshot(f"save-{change.__name__}", refused.value)


def test_its_own_state_brings_changes_of_layers_into_kernels(
    quantized: QuantizedModel, tmp_path: Path
) -> None:
    with_another_bias(quantized)
    changed = quantized(X)
    quantized.load_state_dict(quantized.state_dict())
    quantized.save(tmp_path / "model.bq")
    assert quantized._is_unchanged() and torch.equal(quantized(X), changed)
    assert torch.equal(backquant.load(tmp_path / "model.bq")(X), changed)


def test_a_state_that_is_loaded_leaves_the_edits_of_the_graph(quantized: QuantizedModel) -> None:
    state, before = quantized.state_dict(), quantized(X)
    with_another_graph(quantized)
    quantized.load_state_dict(state)
    assert torch.equal(quantized(X), before.clamp(-0.1, 0.1)) and not torch.equal(
        quantized(X), before
    )
    state["2.bias"] = state["2.bias"] + 9
    quantized.load_state_dict(state)
    assert torch.equal(quantized(X), torch.full((4, 4), 0.1)) and not quantized._is_unchanged()


def test_a_model_of_another_runtime_is_not_exported_as_it_was_before(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(16, 8))
    quantized = backquant.quantize(net, X, calibration=[X], backend="onnxruntime")
    with_another_graph(quantized)
    with pytest.raises(UsageError, match="as it was made"):
        backquant.export(quantized, tmp_path / "model.onnx")
