"""Attention as one kernel: beside exact arithmetic, on any layout; what is left to PyTorch's operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from backquant.lower.kernels import attention
from backquant.lower.kernels.attention import attended, attended_whole, products, whole
from backquant.lower.kernels.boundary import quantize

often = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALE, ZERO = 0.02, 120
CLOSE = 0.1  # of a step
Call = Callable[[], torch.Tensor]


@pytest.fixture
def called(native_library: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many terms each call of the library adds."""
    found: list[int] = []
    operators = attention._operators()

    def noted(terms: int) -> Any:
        def run(*args: Any) -> Any:
            found.append(terms)
            return operators[terms](*args)

        return run

    monkeypatch.setattr(attention, "_operators", lambda: tuple(noted(n) for n in range(3)))
    yield found


@dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    queries: int
    keys: int
    deep: int
    wide: int


SIZES = st.builds(
    Sizes,
    *(st.integers(1, 3), st.integers(1, 3), st.integers(6, 30)),
    *(st.integers(1, 90), st.integers(1, 70), st.integers(1, 70)),
)
LAYOUTS = ("heads", "channels apart", "one row for all", "turned")


def laid(x: torch.Tensor, layout: str) -> torch.Tensor:
    """``x`` ``[batch, heads, rows, channels]`` with other strides."""
    if layout == "heads":  # side by side in one row
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "channels apart":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if layout == "one row for all":
        return x[:, :, :1].expand_as(x)
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def drawn(s: Sizes, layouts: tuple[str, str, str], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = ((s.queries, s.deep), (s.keys, s.deep), (s.keys, s.wide))
    made = (torch.randn(s.batch, s.heads, *size, generator=generator) for size in rows)
    return [laid(x, layout) for x, layout in zip(made, layouts, strict=True)]


def exact(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Before it is rounded; zeros for a query without a key."""
    found = torch.softmax(scores.double(), -1).nan_to_num(0.0) @ v.double()
    return (found / SCALE + ZERO).clamp(0, 255)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Integers are those of ``expected``; what lies in the middle of two may be either."""
    assert found.dtype == torch.uint8 and found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= 0.5 + CLOSE


layouts = st.tuples(*(st.sampled_from(LAYOUTS),) * 3)


@often
@given(SIZES, layouts, st.sampled_from(("none", "floats", "bools", "causal", "rows")))
@example(Sizes(1, 1, 1, 1, 1, 1), ("heads",) * 3, "none")
@example(Sizes(2, 2, 6, 64, 32, 16), ("turned",) * 3, "causal")
def test_whole_attention(
    called: list[int], s: Sizes, layouts: tuple[str, str, str], mask: str
) -> None:
    called.clear()
    q, k, v = drawn(s, layouts, s.keys)
    generator = torch.Generator().manual_seed(s.deep)
    shown: torch.Tensor | None = None
    term = torch.zeros(())
    if mask == "floats":
        shown = term = torch.randn(s.batch, s.heads, s.queries, s.keys, generator=generator)
    elif mask == "rows":
        shown = term = torch.randn(s.keys, generator=generator).expand(s.queries, s.keys)
    elif mask != "none":
        bools = torch.rand(s.batch, 1, s.queries, s.keys, generator=generator) < 0.7
        bools[..., 0] = True
        shown = bools if mask == "bools" else None
        bools = bools if mask == "bools" else torch.ones(s.queries, s.keys).tril().bool()
        term = torch.zeros(bools.shape).masked_fill(~bools, -torch.inf)
    found = attended_whole(q, k, v, shown, mask == "causal", None, False, SCALE, ZERO)
    scores = q.double() @ k.double().transpose(2, 3) / math.sqrt(s.deep) + term
    check(found, exact(scores, v))
    assert called == [int(mask != "none")]


@often
@given(SIZES, layouts, st.sampled_from(("plain", "bias", "windows", "filled", "by head", "rank 3")))
def test_attention_by_products(
    called: list[int], s: Sizes, layouts: tuple[str, str, str], kind: str
) -> None:
    called.clear()
    q, k, v = drawn(s, layouts, s.keys)
    generator = torch.Generator().manual_seed(s.deep)
    factor, terms = s.deep**-0.5, 0
    steps: list[tuple[str, Any]] = [("queries_mul", factor)]
    bias = torch.randn(s.heads, s.queries, s.keys, generator=generator)
    if kind == "rank 3":
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
        steps = [("mul", 2.0), ("div", 2.0 / factor)]
    scores = q.double() @ k.double().transpose(-1, -2) * factor
    if kind in ("bias", "windows"):
        steps.append(("add", bias))
        scores, terms = scores + bias, 1
    if kind == "windows":
        mask = torch.randn(1, s.batch, 1, s.queries, s.keys, generator=generator)
        shape = (1, s.batch, s.heads, s.queries, s.keys)
        steps += [("reshape", (-1, *shape[1:])), ("add", mask), ("reshape", shape[1:])]
        scores, terms = (scores + mask).view(shape[1:]), 2
    if kind == "filled":
        hidden = torch.rand(s.queries, s.keys, generator=generator) < 0.3
        hidden[:, 0] = False
        steps.append(("masked_fill", (hidden, -torch.inf)))
        scores, terms = scores.masked_fill(hidden, -torch.inf), 1
    if kind == "by head":
        each = torch.rand(s.heads, 1, 1, generator=generator)
        steps.append(("mul", each))
        scores = scores * each
    found = attended(q, k.transpose(-1, -2), v, tuple(steps), SCALE, ZERO)
    check(found, exact(scores, v))
    assert called == [terms]


@pytest.mark.parametrize("size", [1e-16, 1e-4, 30.0, 1e4, 1e15])
def test_numbers_of_any_size(called: list[int], size: float) -> None:
    """Scores that lie far apart, too: rows have scales of their own."""
    q, k, v = drawn(Sizes(1, 2, 20, 50, 64, 33), ("heads",) * 3, 3)
    q, k = q * size, k / size * 20
    k[:, :, 7] *= 1e-3
    found = attended_whole(q, k, v * size, None, False, 0.1, False, SCALE * size, ZERO)
    scores = q.double() @ k.double().transpose(2, 3) * 0.1
    assert scores.abs().max() > 40
    off = (found.double() - exact(scores, v).round()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 0.05
    assert called == [0]


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("size", [Sizes(1, 1, 300, 200, 16, 16), Sizes(2, 3, 90, 80, 16, 16)])
def test_any_number_of_threads(called: list[int], size: Sizes, threads: int) -> None:
    q, k, v = drawn(size, ("heads",) * 3, 1)
    numbers = (None, False, None, False, SCALE, ZERO)
    expected = attended_whole(q, k, v, *numbers)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(attended_whole(q, k, v, *numbers), expected)
    finally:
        torch.set_num_threads(1)
    assert called == [0, 0]


def by_operators(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    found = F.scaled_dot_product_attention(q, k, v, **kwargs)
    return quantize(found, SCALE, ZERO, 0, 255, torch.uint8)


_SOME = Sizes(1, 2, 6, 20, 16, 16)
_Q, _K, _V = drawn(_SOME, ("heads",) * 3, 1)
_PLAIN = (None, False, None, False, SCALE, ZERO)
# by what is not taken: a call, and the same by operators
LEFT: dict[str, tuple[Call, Call]] = {
    "few queries": (
        lambda: attended_whole(_Q[:, :, :1], _K, _V, *_PLAIN),
        lambda: by_operators(_Q[:, :, :1], _K, _V),
    ),
    "heads that share": (
        lambda: attended_whole(_Q, _K[:, :1], _V[:, :1], None, False, None, True, SCALE, ZERO),
        lambda: by_operators(_Q, _K[:, :1], _V[:, :1], enable_gqa=True),
    ),
    "an empty batch": (
        lambda: attended_whole(_Q[:0], _K[:0], _V[:0], *_PLAIN),
        lambda: by_operators(_Q[:0], _K[:0], _V[:0]),
    ),
    "five dimensions": (
        lambda: attended_whole(_Q[None], _K[None], _V[None], *_PLAIN),
        lambda: by_operators(_Q[None], _K[None], _V[None]),
    ),
    "batches that repeat": (
        lambda: attended_whole(_Q.expand(3, -1, -1, -1), _K, _V, *_PLAIN),
        lambda: by_operators(_Q.expand(3, -1, -1, -1), _K, _V),
    ),
    "many keys": (
        lambda: attended_whole(_Q, _K.repeat(1, 1, 300, 1), _V.repeat(1, 1, 300, 1), *_PLAIN),
        lambda: by_operators(_Q, _K.repeat(1, 1, 300, 1), _V.repeat(1, 1, 300, 1)),
    ),
    "halves": (
        lambda: attended_whole(_Q.half(), _K.half(), _V.half(), *_PLAIN),
        lambda: by_operators(_Q.half(), _K.half(), _V.half()),
    ),
    "three terms": (
        lambda: attended(_Q, _K.mT, _V, (("add", torch.ones(20)),) * 3, SCALE, ZERO),
        lambda: products(_Q, _K.mT, _V, (("add", torch.ones(20)),) * 3, SCALE, ZERO),
    ),
    "scores that are scaled behind a term": (
        lambda: attended(_Q, _K.mT, _V, (("add", torch.ones(20)), ("mul", 0.5)), SCALE, ZERO),
        lambda: products(_Q, _K.mT, _V, (("add", torch.ones(20)), ("mul", 0.5)), SCALE, ZERO),
    ),
    "scores that are set to a small number": (
        lambda: attended(_Q, _K.mT, _V, (("masked_fill", (_K[0, 0, :, 0] > 0, 1.0)),), SCALE, ZERO),
        lambda: products(_Q, _K.mT, _V, (("masked_fill", (_K[0, 0, :, 0] > 0, 1.0)),), SCALE, ZERO),
    ),
    "a reshape of heads": (
        lambda: attended(_Q, _K.mT, _V, (("reshape", (2, 1, 6, 20)),), SCALE, ZERO),
        lambda: products(_Q, _K.mT, _V, (("reshape", (2, 1, 6, 20)),), SCALE, ZERO),
    ),
    "a term for each key of another length": (
        lambda: attended(_Q, _K.mT, _V, (("add", torch.ones(1, 1, 6, 1)),), SCALE, ZERO),
        lambda: products(_Q, _K.mT, _V, (("add", torch.ones(1, 1, 6, 1)),), SCALE, ZERO),
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_the_operators(called: list[int], case: str) -> None:
    """The same integers as without the kernel, in the same layout but for their strides."""
    call, expected = LEFT[case]
    assert torch.equal(call(), expected())
    assert not called


def test_without_the_library_results_are_those_of_the_operators() -> None:
    found = attended_whole(_Q, _K, _V, *_PLAIN)
    assert torch.equal(found, by_operators(_Q, _K, _V))
    assert found.transpose(1, 2).is_contiguous()
    scores = torch.matmul(_Q * 0.25, _K.mT) + 1.5
    plain = quantize(torch.matmul(scores.softmax(-1), _V), SCALE, ZERO, 0, 255, torch.uint8)
    steps = (("queries_mul", 0.25), ("add", 1.5))
    assert torch.equal(attended(_Q, _K.mT, _V, steps, SCALE, ZERO), plain)


def test_errors_are_those_of_the_operators(called: list[int]) -> None:
    with pytest.raises(RuntimeError) as expected:
        whole(_Q, _K[..., 1:], _V, *_PLAIN)
    with pytest.raises(RuntimeError) as found:
        attended_whole(_Q, _K[..., 1:], _V, *_PLAIN)
    assert str(found.value) == str(expected.value) and not called


def _given(**changed: Any) -> tuple[Any, ...]:
    """Arguments of the operator with two terms."""
    x, y = torch.zeros(1, 1, 6, 20), torch.zeros(1, 2, 1, 20)
    known = {"q": _Q, "k": _K, "v": _V, "x": x, "y": y, "scale": 1.0, "out": SCALE, "zero": ZERO}
    return tuple((known | changed).values())


HOSTILE = {
    "bytes": {"q": _Q.to(torch.uint8)},
    "three dimensions": {"q": _Q[0], "k": _K[0], "v": _V[0]},
    "channels apart": {"k": laid(_K, "channels apart")},
    "other batches": {"q": _Q.expand(2, -1, -1, -1)},
    "fewer heads": {"v": _V[:, :1]},
    "fewer rows": {"v": _V[:, :, 1:]},
    "fewer channels": {"k": _K[..., 1:]},
    "nothing": {"q": _Q[:, :, :0]},
    "a term of bytes": {"x": torch.zeros(1, 1, 6, 20, dtype=torch.uint8)},
    "a term with fewer keys": {"x": torch.zeros(1, 1, 6, 19)},
    "a term with fewer queries": {"y": torch.zeros(1, 1, 5, 20)},
    "a term with more heads": {"y": torch.zeros(1, 3, 6, 20)},
    "a term with more batches": {"x": torch.zeros(2, 1, 6, 20)},
    "a term without batches": {"x": torch.zeros(0, 1, 6, 20)},
    "a term with keys apart": {"x": torch.zeros(1, 1, 20, 6).transpose(2, 3)},
    "a term of three dimensions": {"x": torch.zeros(1, 6, 20)},
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.usefixtures("native_library")
def test_the_library_checks_what_it_is_given(case: str) -> None:
    """Whatever calls it: it reads no memory but that of its arguments."""
    run = torch.ops.backquant_kernels.attention_biased_twice.default
    assert run(*_given()).shape == (1, 2, 6, 16)
    with pytest.raises(RuntimeError, match=r"attention|scores"):
        run(*_given(**HOSTILE[case]))
