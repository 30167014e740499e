"""The patterns match what ``re.match`` does, in bounded time."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backquant import QConfigMapping
from backquant.errors import ConfigError
from backquant.qconfig.mapping import NamePattern

PIECES = st.sampled_from(
    [
        *(
            "a",
            "b",
            ".",
            "0",
            "1",
            "_",
            "\n",
            "é",
            r"\.",
            r"\d",
            r"\D",
            r"\w",
            r"\W",
            r"\s",
            "[ab]",
        ),
        *("[^a.]", "[a-z0-9]", "^", "$", r"\b", r"\B", r"\A", r"\Z", r"[^\d]", "(?i:A)", "(?s:.)"),
    ]
)


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{0,2}", "{1,}"])
    return st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.tuples(inner, repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        inner.map(lambda part: f"(?={part})"),
        inner.map(lambda part: f"(?!{part})"),
    )


PATTERNS = st.recursive(PIECES, _grown, max_leaves=6)
NAMES = st.text(alphabet="abAB.01_\né", max_size=6)


@settings(deadline=None, max_examples=300)
@given(PATTERNS, NAMES, st.sampled_from(["", "(?i)", "(?m)", "(?a)", "(?s)"]))
def test_it_is_what_re_matches(pattern: str, name: str, flag: str) -> None:
    wanted = re.match(flag + pattern, name)
    assert NamePattern(flag + pattern).matches(name) == (wanted is not None)


@pytest.mark.parametrize("pattern", [r"(?<=a)b", r"a(?<!b)\.", r"(?P<x>a|b)+\.fc", r"(?<=\.)"])
@pytest.mark.parametrize("name", ["ab", "a.fc", "b.", "ba.fc", "", ".a"])
def test_looking_back(pattern: str, name: str) -> None:
    assert NamePattern(pattern).matches(name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|a)*b",
        "(.*)*b",
        ".*.*.*.*.*.*b",
        "(a?){4000}b",
        "((a*)*)*b",
        "(?=.*(?=.*(?=.*(?=.*b))))",
    ],
)
def test_what_takes_re_for_ever_ends(pattern: str) -> None:
    assert not NamePattern(pattern).matches("a" * 300)
    mapping = QConfigMapping().set_module_name_regex(pattern, None)
    assert list(mapping.module_name_regex_qconfigs) == [pattern]


@pytest.mark.parametrize("pattern", [r"(a)\1", r"(a)?(?(1)b|c)", "(", "[", "*", "a{3,2}", 5])
def test_what_is_none_is_refused(pattern: Any) -> None:
    with pytest.raises(ConfigError, match="set_module_name_regex"):
        QConfigMapping().set_module_name_regex(pattern, None)
