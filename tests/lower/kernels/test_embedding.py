"""Tables of integers, against the dequantized table and against torch's own packed ones."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from torch.nn import functional as F

from backquant.errors import ArtifactError, InputError
from backquant.lower.kernels.embedding import (
    EmbeddingConfig,
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
    rowwise_table,
)


def _case(bits: int, columns: int):
    integers = torch.randint(0, 2**bits, (20, columns), dtype=torch.uint8)
    scale, zero_point = torch.rand(20) * 0.1 + 0.01, torch.rand(20) * 2**bits
    table = rowwise_table(integers, scale, zero_point, bits)
    return table, (integers - zero_point.unsqueeze(1)) * scale.unsqueeze(1)


def _tolerance(bits: int) -> dict[str, float]:
    return {"atol": 1e-5} if bits == 8 else {"atol": 0.01, "rtol": 2e-3}  # float16 qparams


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("columns", [1, 6, 7, 16, 130])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows(bits, columns, dtype):
    table, expected = _case(bits, columns)
    kernel = QuantizedEmbedding(EmbeddingConfig(bits, columns), table)
    for shape in ((), (3,), (0,), (2, 0), (2, 3, 4)):
        indices = torch.randint(0, 20, shape, dtype=dtype)
        out = kernel(indices)
        assert out.shape == (*shape, columns)
        assert torch.allclose(out, expected[indices.long()], **_tolerance(bits))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("last", [False, True])
def test_bags(bits, mode, last):
    table, expected = _case(bits, 7)
    kernel = QuantizedEmbeddingBag(EmbeddingConfig(bits, 7, mode, last), table)
    indices = torch.randint(0, 20, (9,))
    offsets = torch.tensor([0, 4, 4, 6, 9] if last else [0, 4, 4, 6])
    options = {"mode": mode, "include_last_offset": last}
    flat = F.embedding_bag(indices, expected, offsets, **options)
    assert torch.allclose(kernel(indices, offsets), flat, **_tolerance(bits))
    table2d = indices.reshape(3, 3)
    square = F.embedding_bag(table2d, expected, mode=mode)
    assert torch.allclose(kernel(table2d), square, **_tolerance(bits))


@pytest.mark.parametrize("bits", [8, 4])
def test_weighted_bags(bits):
    table, expected = _case(bits, 6)
    kernel = QuantizedEmbeddingBag(EmbeddingConfig(bits, 6), table)
    indices, weights = torch.randint(0, 20, (2, 5)), torch.rand(2, 5)
    wanted = F.embedding_bag(indices, expected, mode="sum", per_sample_weights=weights)
    assert torch.allclose(kernel(indices, None, weights), wanted, **_tolerance(bits))
    mean = QuantizedEmbeddingBag(EmbeddingConfig(bits, 6, "mean"), table)
    with pytest.raises(InputError, match="weights"):
        mean(indices, None, weights)


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.quint8), (4, torch.quint4x2)])
def test_the_layout_is_that_of_torch(bits, dtype):
    weight = torch.randn(20, 8)
    scale, zero_point = torch.rand(20) * 0.1 + 0.1, torch.rand(20) * 2**bits
    quantized = torch.quantize_per_channel(weight, scale, zero_point, 0, dtype)
    rounded = (weight * (1 / scale).unsqueeze(1) + zero_point.unsqueeze(1)).round()
    integers = rounded.clamp(0, 2**bits - 1).to(torch.uint8)
    packed = torch.ops.quantized.embedding_bag_prepack(quantized)
    operator = (
        torch.ops.quantized.embedding_byte if bits == 8 else torch.ops.quantized.embedding_4bit
    )
    indices = torch.randint(0, 20, (50,))
    table = rowwise_table(integers, scale, zero_point, bits)
    kernel = QuantizedEmbedding(EmbeddingConfig(bits, 8), table)
    assert torch.equal(kernel(indices), operator(packed, indices))


@pytest.mark.parametrize("index", [20, -1])
def test_indices_outside_of_the_table_are_refused(index):
    table, _ = _case(8, 4)
    with pytest.raises(RuntimeError, match="out of bounds"):
        QuantizedEmbedding(EmbeddingConfig(8, 4), table)(torch.tensor([0, index]))


@pytest.mark.parametrize("cls", [QuantizedEmbedding, QuantizedEmbeddingBag])
def test_copies_and_files(cls):
    table, _ = _case(4, 7)
    kernel, indices = cls(EmbeddingConfig(4, 7), table), torch.randint(0, 20, (3, 4))
    expected = kernel(indices)
    assert list(kernel.state_dict()) == ["table"]
    assert torch.equal(copy.deepcopy(kernel)(indices), expected)
    assert torch.equal(pickle.loads(pickle.dumps(kernel))(indices), expected)
    assert torch.equal(copy.deepcopy(kernel).half()(indices), expected)
    config = json.loads(json.dumps(kernel.artifact_config()))
    assert torch.equal(cls.from_artifact(config, {"table": table})(indices), expected)
    with pytest.raises(ArtifactError, match="lacks its table"):
        cls.from_artifact(config, {})
    with pytest.raises(ArtifactError, match="lacks its table"):
        cls.from_artifact({**config, "bits": 3}, {"table": table})
