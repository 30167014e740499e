"""Stock models down the roads: each kernel beside the reference model, files, compiled code, exports.

Which cells run here is in ``cells.py``; ``tools/stock_matrix.py`` runs them all. A cell that is known to fail
stands in ``known_failures.yaml`` with the error and the reason, and must fail in that way until it is fixed.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import yaml
from benchmarks.stock.catalogue import catalogue
from benchmarks.stock.entry import FAMILIES
from benchmarks.stock.roads import ROADS, SETUPS, Quantized, Setup, quantized

from stock_cells import CELLS

KNOWN: dict[str, dict[str, str]] = yaml.safe_load(
    (Path(__file__).parent / "known_failures.yaml").read_text(encoding="utf-8")
)


@lru_cache(maxsize=1)
def made(name: str, setup: Setup) -> Quantized:
    """The last one is kept: the cells of a model and a setup follow each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries about themselves
        return quantized(catalogue()[name], setup)


def cells() -> list[object]:
    return [
        pytest.param(
            name,
            road,
            id=f"{name}-{road}".replace(" ", "_"),
            marks=pytest.mark.xdist_group(f"{name} {SETUPS[road]}"),
        )
        for name, roads in CELLS.items()
        for road in roads
    ]


@pytest.mark.stock
@pytest.mark.parametrize(("name", "road"), cells())
def test_road(name: str, road: str) -> None:
    expected = KNOWN.get(name, {}).get(road)
    try:
        ROADS[road](made(name, SETUPS[road]))
    except Exception as error:
        kind = type(error).__name__
        if expected is None or not expected.startswith(f"{kind}: "):
            raise
        return
    finally:
        torch.set_grad_enabled(True)
    assert expected is None, f"works now: take {name!r}, {road!r} off known_failures.yaml"


@pytest.mark.stock
def test_known_failures_are_cells() -> None:
    """A name that nothing runs would stay on the list for ever."""
    names = catalogue()
    for name, roads in KNOWN.items():
        assert name in names
        assert roads
        for road, reason in roads.items():
            assert road in ROADS, f"{name}: no road {road!r}"
            error, _, words = reason.partition(": ")
            assert error.isidentifier()
            assert words.strip()


@pytest.mark.stock
def test_what_runs_here_is_a_matrix() -> None:
    names = catalogue()
    assert len(CELLS) >= 40
    assert set(CELLS) <= set(names)
    assert {road for roads in CELLS.values() for road in roads} <= set(ROADS)
    families = {names[name].family for name in CELLS}
    assert families >= set(FAMILIES) - {"time series", "text and images"}
