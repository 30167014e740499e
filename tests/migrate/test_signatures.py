"""The signatures that calls are rewritten to, against those that exist."""

from __future__ import annotations

import inspect

import pytest
from torch.ao.quantization import quantize_fx

import backquant
from backquant.migrate.signatures import CONFIGS, KEYWORDS, SIGNATURES


@pytest.mark.parametrize("target", sorted(SIGNATURES))
def test_parameters_are_pytorchs(target: str) -> None:
    name = target.rpartition(".")[2]
    theirs = inspect.signature(inspect.unwrap(getattr(quantize_fx, name))).parameters
    known = SIGNATURES[target]
    assert tuple(theirs) == known.parameters
    required = tuple(n for n, p in theirs.items() if p.default is inspect.Parameter.empty)
    assert required == known.required


@pytest.mark.parametrize("target", sorted(SIGNATURES))
def test_parameters_that_are_not_missing_are_taken(target: str) -> None:
    """A parameter that backquant's function gets is no longer to be listed as missing."""
    ours = inspect.signature(getattr(backquant, target.rpartition(".")[2])).parameters
    known = SIGNATURES[target]
    refused = {"_equalization_config"}  # taken, to be refused with a reason
    expected = set(known.parameters) - (set(known.missing) - refused)
    assert set(ours) & set(known.parameters) == expected


def test_configs_are_parameters_and_classes() -> None:
    parameters = {name for known in SIGNATURES.values() for name in known.parameters}
    assert set(CONFIGS) <= parameters
    assert set(KEYWORDS.values()) <= parameters
    assert all(hasattr(backquant, cls.rpartition(".")[2]) for cls in CONFIGS.values())
