from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from backquant.observe import MinMaxObserver

batches = st.lists(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=0, max_size=4),
    min_size=1,
    max_size=4,
).filter(any)


@given(data=batches, symmetric=st.booleans())
def test_qparams_equal_the_oracle(
    data: list[list[float]],
    symmetric: bool,
    oracle: Callable[..., Any],
    assert_same_qparams: Callable[..., None],
) -> None:
    kwargs: dict[str, Any] = {"dtype": torch.qint8}
    if symmetric:
        kwargs["qscheme"] = torch.per_tensor_symmetric
    ours, theirs = MinMaxObserver(**kwargs), oracle("MinMaxObserver", **kwargs)
    for batch in data:
        ours(torch.tensor(batch)), theirs(torch.tensor(batch))
    assert torch.equal(ours.min_val, theirs.min_val)
    assert_same_qparams(ours.calculate_qparams(), theirs.calculate_qparams())


@given(data=batches, order=st.randoms(use_true_random=False))
def test_merging_in_any_order_is_seeing_all(data: list[list[float]], order: Any) -> None:
    whole = MinMaxObserver()
    parts = []
    for batch in data:
        whole(torch.tensor(batch))
        part = MinMaxObserver()
        part(torch.tensor(batch))
        parts.append(part)
    order.shuffle(parts)
    merged = parts[0]
    for part in parts[1:]:
        merged = part.merge(merged) if order.random() < 0.5 else merged.merge(part)
    assert torch.equal(merged.min_val, whole.min_val)
    assert torch.equal(merged.max_val, whole.max_val)


def test_repr_shows_the_range() -> None:
    observer = MinMaxObserver()
    observer(torch.tensor([1.0, 2.0]))
    assert repr(observer) == "MinMaxObserver(min_val=1.0, max_val=2.0)"
