"""Observers of groups and blocks: each block is what a per-tensor observer of it alone would find."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from backquant.dtypes import QParams, dequantize_tensor, quantize_tensor
from backquant.dtypes.table import INT2, INT4, UINT4
from backquant.errors import ConfigError
from backquant.observe import (
    BlockMinMaxObserver,
    BlockMSEObserver,
    FakeQuantize,
    MinMaxObserver,
    PerChannelMinMaxObserver,
)


@pytest.mark.parametrize("granularity", ["per_group(size=4)", "per_block(shape=[2, 4])"])
@pytest.mark.parametrize(
    ("dtype", "scheme"), [(INT4, torch.per_channel_symmetric), (UINT4, torch.per_channel_affine)]
)
def test_each_block_by_itself(granularity: str, dtype: torch.dtype, scheme: torch.qscheme) -> None:
    x = torch.randn(4, 8)
    observer = BlockMinMaxObserver(granularity, dtype=dtype, qscheme=scheme)
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    rows, columns = 4 // scale.shape[0], 8 // scale.shape[1]
    alone = torch.per_tensor_symmetric if scheme == torch.per_channel_symmetric else None
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            one = MinMaxObserver(dtype=dtype, qscheme=alone or torch.per_tensor_affine)
            one(x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns])
            expected = one.calculate_qparams()
            assert torch.equal(scale[i, j], expected[0][0])
            assert int(zero_point[i, j]) == int(expected[1])


def test_merging_is_exact_and_empty_or_infinite_values_say_nothing() -> None:
    whole, one, other = (BlockMinMaxObserver("per_group(size=2)") for _ in range(3))
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    for part in (x, y):
        whole(part)
    one(x), other(y)
    assert torch.equal(one.merge(other).min_val, whole.min_val)
    whole(torch.full((2, 4), torch.inf))
    whole(torch.empty(0, 4))
    assert torch.equal(one.max_val, whole.max_val)
    assert whole.ignored == 8


def test_clipping_never_adds_to_the_error() -> None:
    x = torch.randn(16, 64) ** 3
    errors = []
    for made in (BlockMinMaxObserver, BlockMSEObserver):
        observer = made("per_group(size=32)", dtype=INT2)
        observer(x)
        scale, zero_point = observer.calculate_qparams()
        q = quantize_tensor(x, QParams(scale, zero_point, -2, 1, INT2, block=(1, 32)))
        back = dequantize_tensor(q, scale, zero_point, block=(1, 32))
        errors.append((back - x).square().reshape(16, 2, 32).sum(-1))
    assert bool((errors[1] <= errors[0]).all())
    assert float(errors[1].sum()) < 0.9 * float(errors[0].sum())


def test_messages(snapshot: Callable[..., None]) -> None:
    seen = BlockMinMaxObserver("per_group(size=2)")
    seen(torch.zeros(1, 4))
    wrong: tuple[Callable[[], object], ...] = (
        lambda: BlockMinMaxObserver("per_group"),
        lambda: BlockMinMaxObserver(qscheme=torch.per_tensor_symmetric),
        lambda: BlockMinMaxObserver("per_group(size=128)")(torch.zeros(2, 100)),
        lambda: seen(torch.zeros(1, 8)),
        lambda: BlockMSEObserver().merge(BlockMSEObserver()),
        lambda: FakeQuantize(observer=BlockMinMaxObserver, dtype=INT4),
    )
    errors = []
    for make in wrong:
        with pytest.raises(ConfigError) as error:
            make()
        errors.append(str(error.value))
    snapshot("blocks", "\n".join(errors))


BY_HAND = {
    "use torch.per_channel": lambda *_: [
        BlockMinMaxObserver(qscheme=one)
        for one in (torch.per_channel_symmetric, torch.per_channel_affine)
    ],
    "groups of 100": lambda *_: BlockMinMaxObserver("per_group(size=100)")(torch.zeros(2, 100)),
    "an observer for each weight": lambda *_: BlockMinMaxObserver("per_group(size=2)")(
        torch.zeros(1, 8)
    ),
    "let one observer see": lambda *_: BlockMSEObserver()(torch.zeros(2, 256)),
    "train with one scale per channel": lambda *_: FakeQuantize(
        observer=PerChannelMinMaxObserver, dtype=torch.qint8, qscheme=torch.per_channel_symmetric
    ),
}
