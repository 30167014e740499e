"""Expressions: what is one, what is none, and how it is written again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backquant.backend_config.conditions.expressions import (
    Apply,
    Number,
    Quantity,
    parse_expression,
)
from backquant.errors import SpecError

LEAVES = st.one_of(
    st.builds(Number, st.integers(0, 9)), st.sampled_from([Quantity("a"), Quantity("b", "input")])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda s, a, b: Apply(s, (a, b)), st.sampled_from("+-*/"), inner, inner),
        st.builds(lambda f, a: Apply(f, (a,)), st.sampled_from(["product", "ceil"]), inner),
    ),
    max_leaves=6,
)


@given(TREES)
def test_the_text_of_an_expression_is_the_expression(tree) -> None:
    assert parse_expression(str(tree)) == tree


@pytest.mark.parametrize("text", ["dims[-1]", "dims[1:]", "input.dims[:2]", "-3 * groups"])
def test_items_and_signs(text: str) -> None:
    assert str(parse_expression(text)) == text


WRONG = {
    "call": "__import__('os')",
    "attribute": "a.b.c",
    "power": "groups ** 2",
    "function": "produkt(kernel_size)",
    "arguments": "max(a, b)",
    "step": "dims[::2]",
    "item": "dims[groups]",
    "syntax": "kernel_size *",
    "long": "1 + " * 200 + "1",
    "lambda": "lambda: 1",
    "script": "groups + \uff47roups",
    "brackets": "(" * 300,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_expression(name: str, snapshot) -> None:
    with pytest.raises(SpecError) as error:
        parse_expression(WRONG[name])
    snapshot(f"expression_{name}", str(error.value))


def _listed(fix: str) -> list[str]:
    return fix.removeprefix("functions: ").split(", ")


def _parsed(fix: str, _: object) -> None:
    for one in fix.split(", "):
        parse_expression(one)


BY_HAND = {
    "functions: ": lambda fix, _: [parse_expression(f"{one}(kernel_size)") for one in _listed(fix)],
    **dict.fromkeys(["kernel_height", "max(", "dims["], _parsed),
}
