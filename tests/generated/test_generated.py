"""Generated models of every family on every engine, beside our own reference model.

``tools/random_graphs.py --against reference`` runs thousands.
"""

from __future__ import annotations

import pytest

from generated.check import ENGINES, check

MODELS = 50  # per engine, five of each family


@pytest.mark.parametrize("engine", ENGINES)
def test_generated_models(engine: str) -> None:
    first = MODELS * ENGINES.index(engine)
    found = [check(seed, engine) for seed in range(first, first + MODELS)]
    assert [(one.seed, one.findings) for one in found if one.findings] == []
    assert sum(bool(one.refused) for one in found) < MODELS // 10
    assert sum(one.compared for one in found) > 10 * MODELS
