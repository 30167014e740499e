from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from backquant.artifact.tensors import TensorReader, TensorWriter
from backquant.errors import ArtifactError


def again(tensor: torch.Tensor) -> torch.Tensor:
    writer = TensorWriter()
    key = writer.add(tensor)
    return TensorReader(writer.tensors, writer.strides).get(key)


@given(st.lists(st.integers(0, 4), max_size=5), st.data())
def test_strides_of_dense_tensors_come_back(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    stored = torch.randn([shape[i] for i in order]).permute(
        [order.index(i) for i in range(len(shape))]
    )
    read = again(stored)
    assert torch.equal(read, stored)
    if stored.numel():
        assert read.stride() == stored.stride()


def test_channels_last_also_where_sizes_are_one() -> None:
    for shape in ((4, 3, 2, 2), (4, 3, 1, 1), (4, 1, 3, 3), (1, 3, 2, 2)):
        x = torch.randn(shape).to(memory_format=torch.channels_last)
        assert again(x).stride() == x.stride()
    y = torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d)
    assert again(y).stride() == y.stride()


def test_views_with_gaps_and_overlaps_become_contiguous() -> None:
    for x in (
        torch.randn(4, 4)[:, ::2],
        torch.randn(3, 1).expand(3, 5),
        torch.randn(6).as_strided((3, 3), (1, 1)),
    ):
        assert torch.equal(again(x), x)
        assert again(x).is_contiguous()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int64,
        torch.bool,
    ],
)
def test_dtypes(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2) * 5).to(dtype)
    assert again(x).dtype == dtype and torch.equal(again(x), x)


def test_lazy_conjugates_hold_their_values() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(again(x.conj()), x.conj())
    assert torch.equal(again(x.conj().imag), x.conj().imag)  # a negative bit


def test_a_slice_and_its_whole_are_two_tensors() -> None:
    writer = TensorWriter()
    x = torch.arange(6.0)
    assert writer.add(x) == writer.add(x.detach()) == "t0"
    assert {writer.add(x[:3]), writer.add(x.view(2, 3)), writer.add(x.clone())} == {
        "t1",
        "t2",
        "t3",
    }


def test_empty_tensors_are_not_confused() -> None:
    writer = TensorWriter()
    keys = [writer.add(torch.zeros(0)), writer.add(torch.zeros(0, 3)), writer.add(torch.zeros(0))]
    reader = TensorReader(writer.tensors, writer.strides)
    assert [tuple(reader.get(key).shape) for key in keys] == [(0,), (0, 3), (0,)]


def test_parameters_are_made_once() -> None:
    reader = TensorReader({"t0": torch.ones(2)}, {})
    first = reader.parameter(reader.get("t0"), True)
    assert first is reader.parameter(reader.get("t0"), True)
    assert isinstance(first, nn.Parameter) and first.requires_grad
    assert not reader.parameter(reader.get("t0"), False).requires_grad


class Odd(torch.Tensor):
    pass


def test_messages(snapshot: Callable[..., None]) -> None:
    unusual = {
        "subclass": torch.ones(2).as_subclass(Odd),
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        "lazy": nn.LazyLinear(2).weight,
    }
    for name, tensor in unusual.items():
        with pytest.raises(ArtifactError) as caught:
            TensorWriter().add(tensor)
        snapshot(f"tensor-{name}", caught.value)
    for strides in ([1], [1, 1], [1, 10**9], [-1, 2], [0, 1]):
        with pytest.raises(ArtifactError) as caught:
            TensorReader({"t0": torch.zeros(2, 3)}, {"t0": strides})
    snapshot("tensor-strides", caught.value)
    odd = torch.full((8,), 255, dtype=torch.uint8).view(torch.bool)
    with pytest.raises(ArtifactError) as caught:
        TensorReader({"t0": odd}, {})
    snapshot("tensor-booleans", caught.value)


BY_HAND = {
    "artifacts hold plain": lambda *_: TensorWriter().add(torch.eye(2).to_sparse().to_dense()),
}
