"""Attention's kernel for each set of instructions that it is written for, beside its definition."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backquant.native import SOURCES
from backquant.native.build import FLAGS, find_compiler
from backquant.native.instructions import usable

# by name: the set of instructions that a CPU must have, and what the compiler is told beside its flags
BUILDS = {
    "avx512_vnni": ("avx512_vnni", ()),
    "avx512_vnni, 8 lanes": ("avx512_vnni", ("-DBACKQUANT_LANES=8",)),
    "avx512": ("avx512", ()),
    "avx512, 8 lanes": ("avx512", ("-DBACKQUANT_LANES=8",)),
    "avx2": ("avx2", ()),
}
MAY_BE_OFF = 0.005  # the share of results that may be a step off
SOURCE = """
#include "attention.h"
using namespace backquant;
#define SHOWN extern "C" __attribute__((visibility("default")))
SHOWN int64_t lanes() { return LANES; }
SHOWN int64_t step() { return STEP; }
SHOWN void attention(
    const int64_t* s, const float* n, const float* const* data, const int64_t* strides, int64_t terms,
    uint8_t* out) {
  const Attention a{s[0], s[1], s[2], s[3], s[4], s[5], n[0], n[1], n[2], n[3], n[4], n[5]};
  Heads heads[3];
  for (int i = 0; i < 3; i++) {
    const int64_t* own = strides + 4 * i;
    heads[i] = {data[i], own[1], own[2], own[3]};
  }
  Added added[2];
  for (int i = 0; i < terms; i++) {
    const int64_t* own = strides + 12 + 4 * i;
    added[i] = {data[3 + i], own[0], own[1], own[2], own[3]};
  }
  if (terms == 0) attend<0>(a, heads[0], heads[1], heads[2], added, out);
  if (terms == 1) attend<1>(a, heads[0], heads[1], heads[2], added, out);
  if (terms == 2) attend<2>(a, heads[0], heads[1], heads[2], added, out);
}
"""
SCALE, SHIFT = 0.01, 120  # of the result
BEHIND = 64  # bytes behind the result, which nothing writes


@dataclass(frozen=True)
class Case:
    """Sizes; ``added``: of each term batches, heads and queries; ``rounded``: scores are integers first."""

    batch: int
    heads: int
    queries: int
    keys: int
    deep: int
    wide: int
    added: tuple[tuple[int, int, int], ...] = ()
    rounded: bool = False
    masked: bool = False


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch = draw(st.sampled_from((1, 2, 4)))
    heads, queries = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    keys, deep, wide = draw(st.integers(1, 150)), draw(st.integers(1, 70)), draw(st.integers(1, 70))
    divisors = [each for each in (1, 2, 4) if batch % each == 0]
    term = st.tuples(
        st.sampled_from(divisors), st.sampled_from((1, heads)), st.sampled_from((1, queries))
    )
    added = tuple(draw(st.lists(term, max_size=2)))
    rounded, masked = draw(st.booleans()), bool(added) and draw(st.booleans())
    return Case(batch, heads, queries, keys, deep, wide, added, rounded, masked)


def with_gaps(x: torch.Tensor, gap: int) -> torch.Tensor:
    """``x`` in rows that are further apart, with NaN between them: what reads it shows."""
    room = torch.full((*x.shape[:-1], x.shape[-1] + gap), torch.nan)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def drawn(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries, keys and values ``[batch, heads, rows, channels]``, a head's channels side by side in a
    row of all heads; and what is added to the scores."""
    generator = torch.Generator().manual_seed(case.keys * 71 + case.deep)
    shapes = [(case.queries, case.deep), (case.keys, case.deep), (case.keys, case.wide)]
    inputs = [
        with_gaps(torch.randn(case.batch, rows, case.heads, channels, generator=generator), 3)
        for rows, channels in shapes
    ]
    added = [
        with_gaps(torch.randn(*sizes, case.keys, generator=generator), 5) for sizes in case.added
    ]
    if case.masked:  # some rows have no key at all
        hidden = torch.rand(added[0].shape, generator=generator) < 0.3
        hidden[..., 0, :] = True
        added[0][hidden] = -torch.inf
    return [x.transpose(1, 2) for x in inputs], added


STEP, ZERO = 0.05, 110  # of scores that are rounded


def expected(case: Case, inputs: list[torch.Tensor], added: list[torch.Tensor]) -> torch.Tensor:
    q, k, v = (x.double() for x in inputs)
    scores = q @ k.transpose(-1, -2) * case.deep**-0.5
    if case.rounded:
        scores = ((scores / STEP).round() + ZERO).clamp(0, 255).sub(ZERO) * STEP
    for term in added:
        scores = scores + term.double().repeat(case.batch // term.shape[0], 1, 1, 1)
    found = torch.softmax(scores, -1).nan_to_num(0.0) @ v  # zeros without a key
    return ((found / SCALE).round() + SHIFT).clamp(0, 255).transpose(1, 2)


def computed(
    library: ctypes.CDLL, case: Case, inputs: list[torch.Tensor], added: list[torch.Tensor]
) -> torch.Tensor:
    sizes = (case.batch, case.heads, case.queries, case.keys, case.deep, case.wide)
    bounds = (STEP, float(-ZERO), float(255 - ZERO)) if case.rounded else (0.0, 0.0, 0.0)
    numbers = (case.deep**-0.5, *bounds, 1 / SCALE, float(SHIFT))
    strides = [(x.shape[0], *x.stride()[:3]) for x in inputs]
    repeated = [
        [0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride(), strict=False)]
        for x in added
    ]
    strides += [(x.shape[0], *own) for x, own in zip(added, repeated, strict=True)]
    count = case.batch * case.queries * case.heads * case.wide
    out = torch.full((count + BEHIND,), 77, dtype=torch.uint8)
    flat = list(itertools.chain(*strides))
    pointers = [x.data_ptr() for x in (*inputs, *added)]
    library.attention(
        (ctypes.c_int64 * len(sizes))(*sizes),
        (ctypes.c_float * len(numbers))(*numbers),
        (ctypes.c_void_p * len(pointers))(*pointers),
        (ctypes.c_int64 * len(flat))(*flat),
        ctypes.c_int64(len(added)),
        ctypes.c_void_p(out.data_ptr()),
    )
    assert (out[count:] == 77).all()
    return out[:count].reshape(case.batch, case.queries, case.heads, case.wide)


def has(name: str) -> bool:
    """Whether this CPU runs a build."""
    return BUILDS[name][0] in [found.name for found in usable()]


@pytest.fixture(scope="module", params=BUILDS)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ctypes.CDLL]:
    name = request.param
    compiler = find_compiler()
    if compiler is None or not has(name):
        pytest.skip(f"no C++ compiler, or a CPU without {name}")
    folder: Path = tmp_path_factory.mktemp("attention")
    (folder / "attention.cpp").write_text(SOURCE)
    instructions, options = BUILDS[name]
    command = [compiler, *FLAGS[instructions], *options, "-I", str(SOURCES)]
    command += [str(folder / "attention.cpp"), "-o", str(folder / "attention.so")]
    subprocess.run(command, check=True, capture_output=True)
    return name, ctypes.CDLL(str(folder / "attention.so"))


def test_builds_differ(built: tuple[str, ctypes.CDLL]) -> None:
    name, library = built
    assert library.lanes() == (16 if name in ("avx512_vnni", "avx512") else 8)
    assert library.step() == (2 if "vnni" in name else 1)


def test_any_attention_is_right(built: tuple[str, ctypes.CDLL]) -> None:
    """Odd lengths, masks, biases, windows; a step off at most, and rarely."""
    name, library = built
    off, total = 0, 0

    @settings(max_examples=80, deadline=None, database=None, derandomize=True)
    @given(cases())
    def one(case: Case) -> None:
        nonlocal off, total
        inputs, added = drawn(case)
        found, wanted = computed(library, case, inputs, added), expected(case, inputs, added)
        steps = (found.double() - wanted).abs()
        # a score near the middle of two integers may become the other one, which moves its whole row
        most = 1 if not case.rounded else 6
        assert steps.max() <= most, case
        off, total = off + int((steps > 0).sum()), total + steps.numel()

    one()
    assert off <= MAY_BE_OFF * total, (name, off, total)
