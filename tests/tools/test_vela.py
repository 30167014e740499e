"""The descriptions of Ethos-U beside Vela's recorded verdicts (``python -m tools.vela.agreement --ask``)."""

from __future__ import annotations

import pytest
from tools.vela.agreement import BACKENDS, compared, recorded
from tools.vela.constraints import listed, missing_fields

# "must be less than 65536" stands in Vela's report; it takes 65536
KNOWN = {f"softmax 256x256 {dtype}" for dtype in ("int8", "int16")}


def test_our_plans_agree_with_vela() -> None:
    """On a fifth of the cases, of every family; ``python -m tools.vela.agreement`` takes all."""
    found = list(compared(step=5))
    wrong = [(where, name, why) for where, name, theirs, ours, why in found if theirs != ours]
    assert len(found) > 300
    assert {name for _, name, _ in wrong} <= KNOWN, wrong


@pytest.mark.parametrize("accelerator", BACKENDS)
def test_verdicts_are_on_both_sides(accelerator: str) -> None:
    verdicts = recorded()[accelerator]
    taken = sum(verdicts.values())
    assert len(verdicts) >= 500
    assert taken >= 400 and len(verdicts) - taken >= 40


def test_each_constraint_is_said_or_has_its_reason() -> None:
    rows = listed()
    cannot = [row for row in rows if "cannot" in row]
    assert len({row["id"] for row in rows}) == len(rows) >= 141
    assert len(cannot) <= 0.1 * len(rows)
    assert all(row.get("said") or row.get("said_like") or row.get("cannot") for row in rows)
    assert missing_fields() == []
