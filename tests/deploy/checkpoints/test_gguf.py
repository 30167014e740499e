"""GGUF: its own package dequantizes our weights, transformers computes with them; the tokenizer is there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.checkpoints.gguf import in_pairs
from backquant.deploy.checkpoints.read import HubFolder
from backquant.errors import ExportError, UsageError
from backquant.pipeline.checkpoint_layers import PlannedLayers, planned_layers
from backquant.pipeline.mappings import weights_by_path
from tiny_decoders import folder_of, logits, make

gguf = pytest.importorskip("gguf")

CASES = [
    ("llama", "int4:32"),
    ("qwen2", "uint4:32"),
    ("qwen3", "int8:64"),
    ("gemma", "int8:32"),
    ("gemma2", "int4:32"),
]


def planned(source: Path, weights: str) -> PlannedLayers:
    config = backquant.get_backend_config("gguf")

    def request(layers: nn.Module) -> Any:
        mapping = weights_by_path(config, {"": weights}, None, layers)
        return mapping.set_module_name("lm_head", None)

    return planned_layers(HubFolder.of(source), config, request)


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    """By GGUF's names, dequantized by its own package."""
    reader = gguf.GGUFReader(file)
    return {
        t.name: torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type)))
        for t in reader.tensors
    }


@pytest.mark.parametrize(("family", "weights"), CASES)
def test_others_read_the_same(family: str, weights: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, place = folder_of(family, tmp_path, shard="100KB"), tmp_path / "model.gguf"
    backquant.quantize_checkpoint(source, place, to="gguf", weights=weights)
    layers, stored = planned(source, weights), tensors_of(place)
    names = gguf.get_tensor_name_map(
        {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[family], 2
    )
    model = make(family)
    exact = not weights.startswith("u")  # a minimum is rounded to float16
    for path in layers.schemes:
        weight = layers.layer(path).dequantized()
        model.get_submodule(path).weight.data = weight
        heads = {"q_proj": 4, "k_proj": 2}.get(path.rpartition(".")[2], 0)
        rows = in_pairs(weight, heads) if heads and family == "llama" else weight
        found = stored[f"{names.get_name(path)}.weight"]
        assert torch.equal(rows, found) if exact else torch.allclose(rows, found, atol=5e-4)
    if family in ("qwen3", "gemma"):
        return  # transformers 5.23 reads no head_dim from such a file, and no Gemma at all
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=place.name).eval()
    assert torch.allclose(logits(model), logits(theirs), atol=1e-5 if exact else 2e-2)


def bpe_tokenizer(folder: Path) -> None:
    letters = {chr(97 + n): n for n in range(26)}
    data = {
        "added_tokens": [{"id": 127, "content": "<end>", "special": True}],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\p{L}+|\\p{N}{1,3}"}},
        "model": {"type": "BPE", "vocab": {**letters, "ab": 26}, "merges": [["a", "b"]]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")


def test_tokenizer(tmp_path: Path) -> None:
    source, place = folder_of("llama", tmp_path), tmp_path / "model.gguf"
    bpe_tokenizer(source)
    backquant.quantize_checkpoint(source, place, to="gguf", weights="int8:32")
    fields = gguf.GGUFReader(place).fields
    held = {name.removeprefix("tokenizer."): f.contents() for name, f in fields.items()}
    assert held["ggml.model"] == "gpt2" and held["ggml.pre"] == "llama-bpe"
    assert held["ggml.tokens"][24:28] == ["y", "z", "ab", "[PAD27]"]
    assert held["ggml.tokens"][127] == "<end>" and held["ggml.token_type"][26:28] == [1, 5]
    assert held["ggml.token_type"][127] == 3 and held["ggml.merges"] == ["a b"]
    assert held["ggml.eos_token_id"] == 2 and held["chat_template"] == "{{ messages }}"


def test_larger_groups_are_several_blocks(tmp_path: Path) -> None:
    source = folder_of("llama", tmp_path)
    for size in (32, 64):
        place = tmp_path / f"{size}.gguf"
        backquant.quantize_checkpoint(source, place, to="gguf", weights=f"int4:{size}")
    layers, stored = planned(source, "int4:64"), tensors_of(tmp_path / "64.gguf")
    path = "model.layers.0.mlp.down_proj"
    assert torch.equal(layers.layer(path).dequantized(), stored["blk.0.ffn_down.weight"])


def test_from_another_format_where_scales_fit(tmp_path: Path) -> None:
    source = folder_of("llama", tmp_path, torch.bfloat16)
    backquant.quantize_checkpoint(
        source, tmp_path / "ct", to="compressed-tensors", weights="int4:32"
    )
    checkpoint = backquant.load_checkpoint(tmp_path / "ct")
    backquant.export(checkpoint, tmp_path / "model.gguf", to="gguf")
    stored = tensors_of(tmp_path / "model.gguf")
    weight = checkpoint.layer("model.layers.1.mlp.up_proj").dequantized()
    assert torch.equal(stored["blk.1.ffn_up.weight"], weight)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_one_tensor(family: str, tmp_path: Path) -> None:
    source, place = folder_of(family, tmp_path), tmp_path / "model.gguf"
    backquant.quantize_checkpoint(source, place, to="gguf", weights="int4:32")
    layers, stored = planned(source, "int4:32"), tensors_of(place)
    names = sorted(
        p for p in layers.schemes if "layers.1." in p and p.endswith(("w2", "down_proj"))
    )
    assert len(names) == 4
    weights = torch.stack([layers.layer(path).dequantized() for path in names])
    assert torch.equal(stored["blk.1.ffn_down_exps.weight"], weights)
    checkpoint = backquant.load_checkpoint(place)
    for path in layers.schemes:
        assert torch.equal(checkpoint.layer(path).values, layers.layer(path).values)


def test_what_is_not_written(tmp_path: Path) -> None:
    source, place = folder_of("llama", tmp_path), tmp_path / "model.gguf"
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["Other"]}))
    with pytest.raises(UsageError, match=r"an? Other is not written as GGUF"):
        backquant.quantize_checkpoint(source, place, to="gguf", weights="int4:32")
    source = folder_of("llama", tmp_path)
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match="rotary embeddings of the type 'linear'"):
        backquant.quantize_checkpoint(source, place, to="gguf", weights="int4:32")
    (source / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    assert not place.exists() and not list(tmp_path.glob(".*"))
