from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.snapshots import compare as snapshot

from backquant.accuracy.search.runners import Budget, parsed
from backquant.errors import UsageError

BY_HAND = {"--budget": lambda fix, _: parsed(fix.split()[1::2])}
BAD: dict[str, Any] = {
    "misspelt": {"max_dorp": 0.1},
    "nothing": {},
    "negative": {"max_ms": -1},
    "no_number": {"max_drop": "1 %"},
    "nan": {"max_ratio": float("nan")},
    "no_mapping": 0.01,
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_budget(name: str) -> None:
    with pytest.raises(UsageError) as error:
        Budget.of(BAD[name])
    snapshot(Path(__file__), name, str(error.value))


def test_a_word_that_is_no_limit() -> None:
    with pytest.raises(UsageError) as error:
        parsed(["max_ms"])
    snapshot(Path(__file__), "no_limit", str(error.value))
