"""GPTQ, AWQ and MLX: packed as their definitions say, read back bit for bit, and converted into each
other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import backquant
from backquant.deploy.checkpoints.formats import find_format
from backquant.deploy.checkpoints.layer import Layer, from_unsigned
from backquant.errors import ArtifactError, ExportError
from tiny_decoders import folder_of

CASES = [
    ("gptq", "int4:32"),
    ("gptq", "uint4:32"),
    ("gptq", "int8:64"),
    ("awq", "uint4:32"),
    ("mlx", "uint4:64"),
]


def some_layer(dtype: str, rows: int = 16, columns: int = 64, groups: int = 2) -> Layer:
    bits = int(dtype.lstrip("uint"))
    values = torch.randint(0, 1 << bits, (rows, columns))
    scale = (torch.rand(rows, groups) + 0.1).half().float()
    zero = torch.randint(0, 1 << bits, (rows, groups)) if dtype.startswith("u") else None
    return from_unsigned("fc", bits, values, scale, zero)


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_round_trip(name: str, weights: str, tmp_path: Path) -> None:
    """What is written is read again, written as compressed-tensors, and back to the same bytes."""
    source, first = folder_of("llama", tmp_path, shard="100KB"), tmp_path / "first"
    report = backquant.quantize_checkpoint(
        source, first, to=name, weights=weights, ignore=("lm_head", "model.embed_tokens")
    )
    assert report.bytes_after < report.bytes_before / 2
    checkpoint = backquant.load_checkpoint(first)
    assert len(checkpoint.schemes) == 14
    backquant.export(checkpoint, tmp_path / "second", to="compressed-tensors")
    second = backquant.load_checkpoint(tmp_path / "second")
    for path in checkpoint.schemes:
        one, two = checkpoint.layer(path), second.layer(path)
        assert torch.equal(one.values, two.values) and one.dtype == two.dtype
        assert torch.equal(one.dequantized(), two.dequantized())
    backquant.export(second, tmp_path / "third", to=name)
    for file in first.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "third" / file.name).read_bytes()


def gptq_weight(stored: dict[str, torch.Tensor], bits: int, less: int) -> np.ndarray:
    """The definition, a value at a time."""
    words, zeros = stored["qweight"].numpy().astype(np.int64), stored["qzeros"].numpy()
    scales, groups = stored["scales"].numpy().astype(np.float64), stored["g_idx"].numpy()
    each, mask = 32 // bits, (1 << bits) - 1
    made = np.zeros((scales.shape[1], len(groups)))
    for row in range(made.shape[0]):
        for column in range(made.shape[1]):
            value = (words[column // each, row] >> (bits * (column % each))) & mask
            group = groups[column]
            zero = (int(zeros[group, row // each]) >> (bits * (row % each))) & mask
            made[row, column] = (value - (zero + less)) * scales[group, row]
    return made


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8"])
def test_gptq_by_definition(dtype: str) -> None:
    layer = some_layer(dtype)
    stored = find_format("gptq").tensors(layer)
    made = gptq_weight(stored, layer.scheme.bits, less=int(not dtype.startswith("u")))
    assert np.array_equal(made.astype(np.float32), layer.dequantized().numpy())


def test_awq_by_definition() -> None:
    layer = some_layer("uint4")
    stored = find_format("awq").tensors(layer)
    places = [0, 4, 1, 5, 2, 6, 3, 7]  # where the n-th of eight values lies in its word
    words, zeros = stored["qweight"].numpy().astype(np.int64), stored["qzeros"].numpy()
    scales = stored["scales"].numpy().astype(np.float64)
    made = np.zeros((16, 64))
    for row in range(16):
        shift = 4 * places[row % 8]
        for column in range(64):
            group = column // 32
            value = (words[column, row // 8] >> shift) & 15
            zero = (int(zeros[group, row // 8]) >> shift) & 15
            made[row, column] = (value - zero) * scales[group, row]
    assert np.array_equal(made.astype(np.float32), layer.dequantized().numpy())


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
def test_mlx_computes_the_same(dtype: str) -> None:
    mx = pytest.importorskip("mlx.core")
    layer = some_layer(dtype)
    stored = {end: mx.array(t.numpy()) for end, t in find_format("mlx").tensors(layer).items()}
    how = {"group_size": 32, "bits": layer.scheme.bits}
    parts = (stored["weight"], stored["scales"], stored["biases"])
    weight = np.array(mx.dequantize(*parts, **how))
    assert np.allclose(weight, layer.dequantized().numpy(), atol=1e-5)
    x = torch.randn(3, 64)
    product = np.array(mx.quantized_matmul(mx.array(x.numpy()), *parts, transpose=True, **how))
    assert np.allclose(product, (x @ layer.dequantized().T).numpy(), atol=2e-2, rtol=1e-4)


def test_mlx_of_its_own_quantizer() -> None:
    """Their zero points are whole: a group's largest value, or 0, is on the grid."""
    mx = pytest.importorskip("mlx.core")
    weight = torch.randn(16, 64)
    parts = mx.quantize(mx.array(weight.numpy()), group_size=32, bits=4)
    read = dict(
        zip(
            ("weight", "scales", "biases"),
            (torch.from_numpy(np.array(p)) for p in parts),
            strict=True,
        )
    )
    form = find_format("mlx")
    scheme = form.scheme_of({"quantization": {"group_size": 32, "bits": 4}})("fc")
    assert scheme is not None
    theirs = torch.from_numpy(np.array(mx.dequantize(*parts, group_size=32, bits=4)))
    try:
        layer = form.layer("fc", scheme, read.__getitem__)
    except ValueError as error:
        assert "no zero points times scales" in str(error)
    else:
        assert torch.allclose(layer.dequantized(), theirs, atol=1e-6)


def changed(folder: Path, **values: Any) -> None:
    import json

    data = json.loads((folder / "config.json").read_text())
    data["quantization_config"] |= values
    (folder / "config.json").write_text(json.dumps(data))


CONTRADICTIONS = {
    "other groups": ("gptq", {"group_size": 64}),
    "other bits": ("gptq", {"bits": 8}),
    "no zero points": ("gptq", {"sym": True, "checkpoint_format": "gptq"}),
    "another layout": ("awq", {"version": "marlin"}),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_configuration_that_contradicts_the_tensors(case: str, tmp_path: Path) -> None:
    name, values = CONTRADICTIONS[case]
    place = tmp_path / "out"
    backquant.quantize_checkpoint(folder_of("llama", tmp_path), place, to=name, weights="uint4:32")
    changed(place, **values)
    with pytest.raises(ArtifactError, match=r"config\.json"):
        checkpoint = backquant.load_checkpoint(place)
        for path in checkpoint.schemes:
            checkpoint.layer(path)


def test_what_a_format_does_not_hold_is_refused_by_the_layer(tmp_path: Path) -> None:
    source, place = folder_of("llama", tmp_path), tmp_path / "out"
    backquant.quantize_checkpoint(source, place, to="compressed-tensors", weights="int4:32")
    checkpoint = backquant.load_checkpoint(place)
    with pytest.raises(ExportError, match=r"awq does not hold model\.layers\.0\.\S+ and 13 more"):
        backquant.export(checkpoint, tmp_path / "awq", to="awq")
    with pytest.raises(ExportError, match="no float16, which the format stores"):
        backquant.export(checkpoint, tmp_path / "gptq", to="gptq")
    mixed = tmp_path / "mixed"
    weights = {"": "int4:32", "model.layers.0.mlp": "int8:32"}
    backquant.quantize_checkpoint(source, mixed, to="compressed-tensors", weights=weights)
    with pytest.raises(ExportError, match="one dtype and group size for all layers"):
        backquant.export(backquant.load_checkpoint(mixed), tmp_path / "g", to="gptq")
    assert not [p for p in tmp_path.iterdir() if p.name in ("awq", "gptq", "g")]
