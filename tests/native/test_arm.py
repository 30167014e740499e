"""The library for ARM, compiled by a cross compiler and run by an emulator: the same integers as on x86."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import emulated
from backquant.native.build import build, sources_digest
from backquant.native.instructions import INSTRUCTION_SETS
from backquant.native.library import (
    Case,
    PlainWeights,
    attention_result,
    cases,
    computed,
    image_results,
    layout,
)
from backquant.native.plan import Result, Shape, magic, plan
from layers import layers

pytestmark = pytest.mark.usefixtures("native_library")
# A CPU that has these instructions, and none beyond them that the kernels know
CPUS = {"neon": "cortex-a72", "neon_dot": "cortex-a76", "neon_i8mm": "max"}
SETS = {found.name: found for found in INSTRUCTION_SETS if found.name in CPUS}
#: Activations whose approximations begin with an estimate of the CPU's
ESTIMATED = ("SWISH", "GELU", "GELU_TANH")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if emulated.lacking():
        pytest.skip(emulated.lacking())
    return emulated.build_driver(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module", params=sorted(SETS))
def arm(
    request: pytest.FixtureRequest, driver: Path, built_kernels: Path
) -> Iterator[tuple[emulated.Emulated, str]]:
    """The operators of one library, and the name of its instructions."""
    name = request.param
    known = f"{sources_digest(name)}-*.so"
    if not list(built_kernels.glob(known)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", emulated.compiler())
            build(built_kernels, name)
    run = emulated.Emulated(driver, next(built_kernels.glob(known)), CPUS[name])
    yield run, name
    run.close()


def both(case: Case, arm: tuple[emulated.Emulated, str]) -> tuple[torch.Tensor, ...]:
    """What ARM and x86 give, and the exact result."""
    run, name = arm
    seed = [torch.Generator().manual_seed(1) for _ in range(2)]
    found, expected = computed(case, seed[0], SETS[name].layout, run)
    return found, computed(case, seed[1], layout())[0], expected


def check(case: Case, arm: tuple[emulated.Emulated, str]) -> None:
    found, other, expected = both(case, arm)
    assert found.shape == other.shape and found.stride() == other.stride()
    off = float((found.double() - expected).abs().max())
    integers = case.result.dtype == torch.uint8
    assert off <= (0.5 + 2e-3 if integers else 1e-5 * float(expected.abs().max()))
    if case.result.activation not in ESTIMATED:
        assert torch.equal(found, other)


def test_its_plans_are_those_of_its_layout(arm: tuple[emulated.Emulated, str]) -> None:
    run, name = arm
    assert run.magic == magic(SETS[name].layout)


@pytest.mark.parametrize("case", cases(), ids=lambda case: "x".join(map(str, case.shape.weight)))
def test_the_layers_of_the_check(case: Case, arm: tuple[emulated.Emulated, str]) -> None:
    check(case, arm)


@given(layers())
@example(Case((2, 3, 4, 9), Shape((8, 3, 1, 3)), Result(1.0, 0, torch.float32, "none", (), "")))
def test_any_layer_is_that_of_x86(arm: tuple[emulated.Emulated, str], case: Case) -> None:
    if case.shape.is_known:
        check(case, arm)


@given(st.tuples(*(st.integers(1, most) for most in (3, 300, 9, 9))))
@example((1, 64, 3, 3))
@example((2, 257, 1, 1))
def test_any_image_is_that_of_x86(
    arm: tuple[emulated.Emulated, str], size: tuple[int, int, int, int]
) -> None:
    seed = [torch.Generator().manual_seed(1) for _ in range(2)]
    found = image_results(size, seed[0], arm[0])
    for (name, here, expected), (_, there, _) in zip(
        found, image_results(size, seed[1]), strict=True
    ):
        assert torch.equal(here, there), name
        assert (here.double() - expected.clamp(0, 255)).abs().max() <= 0.5 + 2e-3


@given(st.tuples(*(st.integers(1, most) for most in (2, 3, 20, 70, 40, 40))), st.integers(0, 2))
@example((1, 1, 1, 1, 1, 1), 0)
def test_any_attention_is_right(
    arm: tuple[emulated.Emulated, str], size: tuple[int, int, int, int, int, int], terms: int
) -> None:
    """In floats, where x86 may multiply whole numbers."""
    found, expected = attention_result(size, terms, torch.Generator().manual_seed(1), arm[0])
    assert (found.double() - expected).abs().max() <= 0.5 + 5e-3


@given(st.integers(1, 70), st.integers(1, 2000), st.integers(1, 40), st.booleans())
@example(9, 2000, 7, False)
def test_sums_of_the_largest_integers(
    arm: tuple[emulated.Emulated, str], out: int, deep: int, rows: int, positive: bool
) -> None:
    run, name = arm
    generator = torch.Generator().manual_seed(deep)
    x = 255 * torch.randint(0, 2, (rows, deep), dtype=torch.uint8, generator=generator)
    weight = torch.where(torch.rand(out, deep, generator=generator) < 0.5, -128, 127).to(torch.int8)
    if positive:  # the largest sum there is
        x, weight = torch.full_like(x, 255), torch.full_like(weight, -128)
    weights = PlainWeights(weight, torch.ones(out), torch.zeros(out))
    result = Result(1.0, 0, torch.float32, "none", (), "")
    for zero_point in (0, 201):
        made = plan(
            Shape((out, deep, 1, 1)), weights, (1.0, zero_point), result, None, SETS[name].layout
        )
        expected = (x.double() - zero_point) @ weight.double().T
        assert torch.equal(run.linear(x, made), expected.float())


def test_a_plan_for_x86_is_refused(arm: tuple[emulated.Emulated, str]) -> None:
    run, name = arm
    shape, result = Shape((8, 20, 1, 1)), Result(1.0, 0, torch.uint8, "none", (), "")
    weights = PlainWeights(torch.ones(8, 20, dtype=torch.int8), torch.ones(8), torch.zeros(8))
    x = torch.zeros(3, 20, dtype=torch.uint8)
    for found in INSTRUCTION_SETS:
        made = plan(shape, weights, (1.0, 0), result, None, found.layout)
        if found.name == name:
            assert run.linear(x, made).shape == (3, 8)
        else:
            with pytest.raises(RuntimeError, match="not a plan"):
                run.linear(x, made)
