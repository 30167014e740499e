"""compressed-tensors: what is written is loaded by transformers and computes the same; what is read is
the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import backquant
from tiny_decoders import dequantized, folder_of, logits

pytest.importorskip("compressed_tensors")

CASES = [
    ("llama", "int4:32", None),
    ("qwen2", "int8", None),
    ("qwen3", "int4", None),
    ("gemma", "float8_e4m3fn", None),
    ("mixtral", "int4:32", None),
]


@pytest.mark.parametrize(("family", "weights", "activations"), CASES)
def test_transformers_computes_the_same(
    family: str, weights: str, activations: str | None, tmp_path: Path, opened: Any
) -> None:
    source, place = folder_of(family, tmp_path, shard="100KB"), tmp_path / "out"
    report = backquant.quantize_checkpoint(
        source, place, to="compressed-tensors", weights=weights, activations=activations
    )
    assert report.bytes_after < report.bytes_before
    checkpoint = backquant.load_checkpoint(place)
    assert len(checkpoint.schemes) == (32 if family == "mixtral" else 14)
    ours = logits(dequantized(checkpoint, tmp_path))
    assert torch.equal(ours, logits(opened(place)))
    assert not torch.equal(ours, logits(opened(source)))
    assert (place / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    index = json.loads((place / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f.name for f in place.glob("*.safetensors")}


def test_zero_points(tmp_path: Path, opened: Any) -> None:
    """transformers 5.23 does not lay out packed zero points; it dequantizes them."""
    from transformers import CompressedTensorsConfig

    place = tmp_path / "out"
    backquant.quantize_checkpoint(
        folder_of("llama", tmp_path), place, to="compressed-tensors", weights="uint4:32"
    )
    checkpoint = backquant.load_checkpoint(place)
    assert any(bool(checkpoint.layer(path).zero_point.ne(8).any()) for path in checkpoint.schemes)
    loaded = opened(place, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert torch.equal(logits(dequantized(checkpoint, tmp_path)), logits(loaded))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_activations_by_token(dtype: str, tmp_path: Path, opened: Any) -> None:
    place = tmp_path / "out"
    backquant.quantize_checkpoint(
        folder_of("llama", tmp_path),
        place,
        to="compressed-tensors",
        weights=dtype,
        activations=dtype,
    )
    checkpoint = backquant.load_checkpoint(place)
    assert {scheme.activation.dtype for scheme in checkpoint.schemes.values()} == {dtype}
    weights_alone, both = logits(dequantized(checkpoint, tmp_path)), logits(opened(place))
    assert 0 < float((both - weights_alone).norm() / weights_alone.norm()) < 0.2


def test_scales_are_rounded_to_the_dtype_of_the_model_first(tmp_path: Path, opened: Any) -> None:
    source, place = folder_of("llama", tmp_path, torch.bfloat16), tmp_path / "out"
    backquant.quantize_checkpoint(source, place, to="compressed-tensors", weights="int4:64")
    checkpoint = backquant.load_checkpoint(place)
    for path in checkpoint.schemes:
        assert checkpoint.layer(path).scale.dtype == torch.bfloat16
    assert torch.equal(logits(dequantized(checkpoint, tmp_path)), logits(opened(place)))


def test_layers_by_path(tmp_path: Path, opened: Any) -> None:
    weights = {"": "int4:32", "model.layers.0.mlp": "int8", "model.layers.1.self_attn.q_proj": None}
    place = tmp_path / "out"
    backquant.quantize_checkpoint(
        folder_of("llama", tmp_path), place, to="compressed-tensors", weights=weights
    )
    checkpoint = backquant.load_checkpoint(place)
    texts = {path: str(scheme) for path, scheme in checkpoint.schemes.items()}
    assert texts["model.layers.0.mlp.up_proj"] == "int8 by row"
    assert texts["model.layers.1.mlp.up_proj"] == "int4 in groups of 32"
    assert "model.layers.1.self_attn.q_proj" not in texts
    assert torch.equal(logits(dequantized(checkpoint, tmp_path)), logits(opened(place)))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("columns", [1, 5, 32, 33, 70])
def test_words_are_those_of_the_library(bits: int, columns: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    from backquant.deploy.checkpoints.layer import pack_words, unpack_words

    values = torch.randint(0, 1 << bits, (7, columns))
    theirs = pack_to_int32((values - (1 << (bits - 1))).to(torch.int8), bits)
    assert torch.equal(pack_words(values, bits), theirs)
    assert torch.equal(unpack_words(theirs, bits, columns).long(), values)


def test_the_library_reads_the_configuration(tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    place = tmp_path / "out"
    backquant.quantize_checkpoint(
        folder_of("gemma", tmp_path), place, to="compressed-tensors", weights="int4:32"
    )
    data = json.loads((place / "config.json").read_text())["quantization_config"]
    known = QuantizationConfig.model_validate(data)
    assert known.ignore == ["lm_head"]
    assert known.config_groups["group_0"].weights.group_size == 32


BLOCKS = {
    "mxfp4": ("mxfp4-pack-quantized", "group", "weight_packed"),
    "mxfp8": ("mxfp8-quantized", "group", "weight"),
    "nvfp4": ("nvfp4-pack-quantized", "tensor_group", "weight_packed"),
}


@pytest.mark.parametrize("weights", BLOCKS)
def test_blocks_of_floats(weights: str, tmp_path: Path, opened: Any) -> None:
    """The library dequantizes them in bfloat16."""
    from compressed_tensors.quantization import QuantizationConfig

    stored_as, strategy, values = BLOCKS[weights]
    place, source = tmp_path / "out", folder_of("llama", tmp_path, torch.bfloat16)
    backquant.quantize_checkpoint(source, place, to="compressed-tensors", weights=weights)
    data = json.loads((place / "config.json").read_text())["quantization_config"]
    [group] = QuantizationConfig.model_validate(data).config_groups.values()
    assert (data["format"], group.format, group.weights.strategy) == (
        stored_as,
        stored_as,
        strategy,
    )
    checkpoint = backquant.load_checkpoint(place)
    assert f"{next(iter(checkpoint.schemes))}.{values}" in checkpoint.source.sizes
    ours = logits(dequantized(checkpoint, tmp_path))
    assert torch.equal(ours, logits(opened(place)))
    assert not torch.equal(ours, logits(opened(source)))


def test_blocks_are_written_again_as_they_were(tmp_path: Path) -> None:
    source, place = folder_of("llama", tmp_path, torch.bfloat16), tmp_path / "out"
    weights = {"": "nvfp4", "model.layers.0.mlp": "mxfp4", "model.layers.1.mlp": "mxfp8"}
    backquant.quantize_checkpoint(source, place, to="compressed-tensors", weights=weights)
    first = backquant.load_checkpoint(place)
    backquant.export(first, tmp_path / "again", to="compressed-tensors")
    again = backquant.load_checkpoint(tmp_path / "again").source
    for name in first.source.sizes:
        before, after = first.source.read(name), again.read(name)
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8)), name
    with pytest.raises(backquant.ExportError, match="gptq does not hold"):
        backquant.export(first, tmp_path / "gptq", to="gptq")


def test_layers_that_servers_compute_as_one_share_the_scale_of_scales(tmp_path: Path) -> None:
    place = tmp_path / "out"
    backquant.quantize_checkpoint(
        folder_of("llama", tmp_path), place, to="compressed-tensors", weights="nvfp4"
    )
    checkpoint = backquant.load_checkpoint(place)
    block = "model.layers.0"

    def unit(path: str) -> float:
        return float(checkpoint.layer(f"{block}.{path}").unit)

    attention = {unit(f"self_attn.{name}_proj") for name in "qkv"}
    assert len(attention) == 1 and attention != {unit("self_attn.o_proj")}
    assert unit("mlp.gate_proj") == unit("mlp.up_proj") != unit("mlp.down_proj")


@pytest.mark.parametrize("weights", BLOCKS)
def test_weights_that_are_all_zero(weights: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source, place = folder_of("llama", tmp_path), tmp_path / "out"
    name = "model.layers.0.self_attn.o_proj"
    tensors = load_file(source / "model.safetensors")
    tensors[f"{name}.weight"] = torch.zeros_like(tensors[f"{name}.weight"])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    backquant.quantize_checkpoint(source, place, to="compressed-tensors", weights=weights)
    layer = backquant.load_checkpoint(place).layer(name)
    assert not bool(layer.dequantized().any()) and bool(layer.scale.isfinite().all())


@pytest.mark.parametrize("weights", BLOCKS)
def test_blocks_of_a_quantized_model(weights: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, ids = folder_of("llama", tmp_path), torch.arange(8).reshape(1, 8)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    quantized = backquant.quantize(
        model,
        {"input_ids": ids, "use_cache": False},
        backend="compressed_tensors",
        weights={"": weights, "lm_head": None},
    )
    place = tmp_path / "out"
    backquant.export(quantized, place, to="compressed-tensors", options={"source": source})
    checkpoint = backquant.load_checkpoint(place)
    for path in checkpoint.schemes:
        weight = quantized.get_submodule(path).get_weight()
        assert torch.allclose(checkpoint.layer(path).dequantized(), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("dtype", "when"), [("int8", ""), ("int8", ":ahead"), ("float8_e4m3fn", ":ahead")]
)
def test_activations_on_data(dtype: str, when: str, tmp_path: Path, opened: Any) -> None:
    """With scales that are measured, and at each call; the server's outputs are near those of the floats."""
    torch.manual_seed(0)
    source, place = folder_of("llama", tmp_path), tmp_path / "out"
    backquant.quantize_checkpoint(
        source,
        place,
        to="compressed-tensors",
        weights=dtype,
        activations=dtype + when,
        calibration=[torch.randint(3, 128, (2, 16)) for _ in range(2)],
        recipe="better",
    )
    checkpoint = backquant.load_checkpoint(place)
    activations = [checkpoint.layer(path).activation for path in checkpoint.schemes]
    assert {one.dtype for one in activations} == {dtype}
    scales = {float(one.scale) for one in activations if one.scale is not None}
    assert len(scales) > 5 if when else not scales
    both, plain = logits(opened(place)), logits(opened(source))
    assert 0 < float((both - plain).norm() / plain.norm()) < 0.2


FIX_NAMES = {"ids": torch.arange(8).reshape(1, 8)}
WRONG: dict[str, dict[str, Any]] = {
    "ahead-without-data": {"activations": "int8:ahead", "calibration": None},
    "float8-at-each-call": {"activations": "float8_e4m3fn", "weights": "float8_e4m3fn"},
    "unknown-activations": {"activations": "int4"},
    "a-step-that-adds": {"recipe": ["products", "gptq"]},
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_asked_of_data(case: str, tmp_path: Path, snapshot: Any) -> None:
    options = {
        "weights": "int8",
        "calibration": [torch.zeros(1, 4, dtype=torch.long)],
        **WRONG[case],
    }
    with pytest.raises(backquant.UsageError) as raised:
        backquant.quantize_checkpoint(
            folder_of("llama", tmp_path), tmp_path / "out", to="compressed-tensors", **options
        )
    assert not (tmp_path / "out").exists()
    snapshot(case, str(raised.value))
