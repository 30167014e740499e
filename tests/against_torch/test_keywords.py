"""Arguments by keyword: the same as our own positional form (PyTorch's convert raises on them)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import fx

from against_torch.graphs import RandomModel, batches
from against_torch.oracle import BACKENDS
from backquant.api import convert_fx, convert_to_reference_fx, prepare_fx
from backquant.prepare import PreparedModule, prepared_state

SEEDS = [
    seed
    for seed in range(120)
    if any(step.operation.keyword is not None for step in RandomModel(seed).steps)
][:25]


def prepared(seed: int, keywords: bool, backend: str) -> PreparedModule:
    model = RandomModel(seed, keywords=keywords)
    own = BACKENDS[backend]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what stays float
        made = prepare_fx(model, own.mapping(), batches(model, seed)[0], backend_config=own.ours)
    for batch in batches(model, seed):
        made(batch)
    return made


def observers(module: PreparedModule) -> list[Any]:
    """Each site without its name's number: two spellings may name their nodes differently."""
    return [
        (site.value, site.role, site.readers, site.producer, site.group)
        for site in prepared_state(module).sites.sites
    ]


def without_arguments(module: fx.GraphModule) -> list[tuple[str, str, list[str]]]:
    return [
        (node.op, str(node.target), [source.name for source in node.all_input_nodes])
        for node in module.graph.nodes
    ]


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
@pytest.mark.parametrize("seed", SEEDS)
def test_keywords_change_nothing(seed: int, backend: str) -> None:
    positional, named = (prepared(seed, keywords, backend) for keywords in (False, True))
    assert prepared_state(named).plan == prepared_state(positional).plan
    assert observers(named) == observers(positional)
    batch = batches(RandomModel(seed), seed)[0]
    one, two = (
        convert_to_reference_fx(module, dialect="decomposed") for module in (positional, named)
    )
    assert without_arguments(one) == without_arguments(two)
    assert_same(one(batch.clone()), two(batch.clone()))
    first, second = convert_fx(positional), convert_fx(named)
    assert [str(use) for use in first.kernels] == [str(use) for use in second.kernels]
    assert_same(first(batch.clone()), second(batch.clone()))


def assert_same(one: Any, two: Any) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
