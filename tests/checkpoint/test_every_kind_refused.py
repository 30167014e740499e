"""Each kind of model, and both libraries' checkpoints: whatever is wrong with one is refused by key, before
anything is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.cases import CASES, pair

import backquant as bq
from backquant.checkpoint import plain_state
from backquant.errors import BackquantError, UsageError

State = dict[str, torch.Tensor]


def _truncated(state: State) -> Iterator[State]:
    for count in (0, 1, len(state) // 2):
        yield dict(list(state.items())[:count])


def _changed(change: Callable[[torch.Tensor], torch.Tensor], end: str = "") -> Any:
    def changed(state: State) -> Iterator[State]:
        for key, value in state.items():
            if key.endswith(end) and value.is_floating_point():
                yield {**state, key: change(value)}

    return changed


WRONG: dict[str, Any] = {
    "truncated": _truncated,
    "NaN": _changed(lambda t: t * float("nan")),
    "negative scales": _changed(lambda t: -1 - t.abs(), "scale"),
    "infinite scales": _changed(lambda t: t + float("inf"), "scale"),
    "another shape": _changed(lambda t: t.new_ones((*t.shape, 7, 3))),
    "of another model": lambda state: iter([{f"encoder.{k}": v for k, v in state.items()}]),
    "no tensors": lambda state: iter([{**state, key: "text"} for key in state]),
}


@pytest.mark.parametrize("kind", CASES)
def test_nothing_wrong_is_loaded(kind: str) -> None:
    made = pair(CASES[kind])
    model = made.ours(calibrated=True)
    x = made.batches[0]
    expected, before = model(*x), {k: v.clone() for k, v in model.state_dict().items()}
    for state in (before, plain_state(made.theirs.state_dict())):
        for name, wrong in WRONG.items():
            for changed in wrong(dict(state)):
                with pytest.raises(UsageError, match=r"nothing was loaded|state_dict"):
                    model.load_state_dict(changed)
                    pytest.fail(f"{name} was loaded")
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(model(*x), expected)


@pytest.mark.parametrize("kind", ["residual", "dynamic linear", "tables"])
def test_a_loaded_model_refuses_them_too(kind: str, tmp_path: Path) -> None:
    made = pair(CASES[kind])
    bq.save(made.ours(calibrated=True), tmp_path / "model.bq")
    model, x = bq.load(tmp_path / "model.bq"), made.batches[0]
    expected = model(*x)
    for changed in _truncated(dict(model.state_dict())):
        with warnings.catch_warnings(), pytest.raises((BackquantError, RuntimeError)):
            model.load_state_dict(changed)
    assert torch.equal(model(*x), expected)
