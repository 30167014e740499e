"""torchao: transformers loads our folders as torchao's tensors; what torchao writes is read, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import ArtifactError
from tiny_decoders import dequantized, folder_of, logits

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

CASES = [
    ("int4:32", None, "IntxUnpackedToInt8Tensor"),
    ("uint4:32", None, "IntxUnpackedToInt8Tensor"),
    ("int8:64", None, "IntxUnpackedToInt8Tensor"),
    ("int8", None, "Int8Tensor"),
    ("float8_e4m3fn", None, "Float8Tensor"),
    ("int4:32", "int8", "IntxUnpackedToInt8Tensor"),
    ("int8", "int8", "Int8Tensor"),
]


@pytest.mark.parametrize(("weights", "activations", "kind"), CASES)
def test_transformers_loads_it(
    weights: str, activations: str | None, kind: str, tmp_path: Path, opened: Any
) -> None:
    pytest.importorskip("torchao")
    source, place = folder_of("llama", tmp_path, torch.bfloat16), tmp_path / "served"
    backquant.quantize_checkpoint(
        source, place, to="torchao", weights=weights, activations=activations
    )
    checkpoint = backquant.load_checkpoint(place)
    model = opened(place)
    for path in checkpoint.schemes:
        weight = model.get_submodule(path).weight
        assert type(weight).__name__ == kind
        theirs, ours = weight.dequantize(), checkpoint.layer(path).dequantized()
        assert torch.equal(theirs.float(), ours.to(theirs.dtype).float())
    said, wanted = logits(model), logits(dequantized(checkpoint, tmp_path))
    assert torch.allclose(said, wanted, atol=0.3 if activations else 0.05)


def test_layers_of_several_kinds_in_shards(tmp_path: Path, opened: Any) -> None:
    pytest.importorskip("torchao")
    source = folder_of("llama", tmp_path, torch.bfloat16, shard="50KB")
    weights = {"": "int4:32", "model.layers.0.mlp": "int8", "model.layers.1.mlp.up_proj": None}
    backquant.quantize_checkpoint(source, tmp_path / "served", to="torchao", weights=weights)
    checkpoint = backquant.load_checkpoint(tmp_path / "served")
    model = opened(tmp_path / "served")
    kinds = {path: type(model.get_submodule(path).weight).__name__ for path in checkpoint.schemes}
    assert kinds["model.layers.0.mlp.up_proj"] == "Int8Tensor"
    assert kinds["model.layers.1.mlp.down_proj"] == "IntxUnpackedToInt8Tensor"
    assert type(model.get_submodule("model.layers.1.mlp.up_proj").weight) is nn.Parameter
    backquant.export(checkpoint, tmp_path / "other", to="compressed-tensors")
    other = backquant.load_checkpoint(tmp_path / "other")
    for path in checkpoint.schemes:
        assert torch.equal(other.layer(path).values, checkpoint.layer(path).values)


def test_what_torchao_writes_is_read(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    source, place = folder_of("llama", tmp_path, torch.bfloat16), tmp_path / "theirs"
    grouped = quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
    )
    for config, dtype in (
        (grouped, "int4"),
        (quantization.Int8WeightOnlyConfig(version=2), "int8"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = AutoModelForCausalLM.from_pretrained(
                source, quantization_config=TorchAoConfig(config), dtype=torch.bfloat16
            )
            made.save_pretrained(place)
        checkpoint = backquant.load_checkpoint(place)
        assert len(checkpoint.schemes) == 14
        for path, scheme in checkpoint.schemes.items():
            weight = made.get_submodule(path).weight
            assert torch.equal(checkpoint.layer(path).values, weight.qdata)
            assert scheme.dtype == dtype


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    import json

    source, place = folder_of("llama", tmp_path), tmp_path / "served"
    backquant.quantize_checkpoint(source, place, to="torchao", weights="int8")
    config = json.loads((place / "config.json").read_text())
    config["quantization_config"]["quant_type"]["default"]["_type"] = "Int4WeightOnlyConfig"
    (place / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="weights made by Int4WeightOnlyConfig"):
        backquant.load_checkpoint(place)
