"""The generator: every operation occurs, one seed is one model, values stay small."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from torch import nn

from against_torch.graphs import RandomModel, batches
from against_torch.operations import OPERATIONS


def test_two_hundred_models_hold_every_operation() -> None:
    models = [RandomModel(seed) for seed in range(200)]
    names = Counter(step.operation.name for model in models for step in model.steps)
    assert set(names) == {operation.name for operation in OPERATIONS}
    reused = sum(
        count > 1
        for model in models
        for count in Counter(index for step in model.steps for index in step.modules).values()
    )
    tied = sum(
        len({id(p) for p in model.parameters()}) < sum(len(m._parameters) for m in model.modules())
        for model in models
    )
    assert reused > 20
    assert tied > 10


def test_a_seed_is_one_model() -> None:
    one, two, other = RandomModel(3), RandomModel(3), RandomModel(4)
    assert [step.operation.name for step in one.steps] == [s.operation.name for s in two.steps]
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert str(one) != str(other) or one.input_shape != other.input_shape


def test_keywords_compute_the_same() -> None:
    for seed in range(30):
        one, two = RandomModel(seed), RandomModel(seed, keywords=True)
        batch = batches(one, seed)[0]
        torch.testing.assert_close(one(batch.clone()), two(batch.clone()), rtol=0, atol=0)


def test_models_are_in_evaluation_mode_and_copy() -> None:
    model = RandomModel(11)
    assert not any(module.training for module in model.modules())
    batch = batches(model, 11)[0]
    torch.testing.assert_close(copy.deepcopy(model)(batch.clone()), model(batch.clone()))
    assert isinstance(model, nn.Module)
