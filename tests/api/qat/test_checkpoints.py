"""Prepared models deep-copy, pickle, and resume from a state dict as if they had not stopped."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import backquant
from backquant.nn.intrinsic.qat import freeze_bn_stats
from backquant.prepare import prepared_state

HOW = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.load(_saved(model), weights_only=False),
}


def _saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


@pytest.mark.parametrize(("how", "after"), [("deepcopy", 0), ("torch.save", 5)])
def test_copies_train_on_alike(qat, model_name, how, after):
    model, shape = qat.model(model_name)
    prepared = qat.ours(model, torch.randn(shape))
    qat.train(prepared, shape, range(after))
    again = HOW[how](prepared)
    assert again.code == prepared.code
    assert prepared_state(again).plan == prepared_state(prepared).plan
    for trained in (again, prepared):
        qat.train(trained, shape, range(after, after + 5))
    qat.equal_states(again, prepared)
    x = torch.randn(shape)
    one, two = (backquant.convert_fx(trained)(x) for trained in (again, prepared))
    for mine, other in zip(*(y if isinstance(y, tuple) else (y,) for y in (one, two)), strict=True):
        assert torch.equal(mine, other)


def test_copies_share_nothing_but_what_was_shared(qat):
    model, shape = qat.model("tied")
    prepared = qat.ours(model, torch.randn(shape))
    again = pickle.loads(pickle.dumps(prepared))
    assert again.get_submodule("first").weight is again.get_submodule("second").weight
    pairs = zip(again.parameters(), prepared.parameters(), strict=True)
    assert all(one is not two for one, two in pairs)


@pytest.mark.parametrize("stop", [0, 7])
def test_resuming_from_a_state_dict_is_bit_equal(qat, model_name, stop):
    model, shape = qat.model(model_name)
    x = torch.randn(shape)
    straight = qat.ours(model, x)
    optimizer = qat.train(straight, shape, range(stop))
    checkpoint = torch.load(
        _saved({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}),
        weights_only=True,
    )
    resumed = qat.ours(qat.model(model_name)[0], x)  # other initial weights
    resumed.load_state_dict(checkpoint["model"])
    optimizer_again = torch.optim.SGD(resumed.parameters(), lr=0.02, momentum=0.9)
    optimizer_again.load_state_dict(checkpoint["optimizer"])
    qat.train(straight, shape, range(stop, stop + 5), optimizer)
    qat.train(resumed, shape, range(stop, stop + 5), optimizer_again)
    qat.equal_states(resumed, straight)


def test_switches_are_part_of_the_state(qat):
    model, shape = qat.model("residual")
    prepared = qat.ours(model, torch.randn(shape))
    qat.train(prepared, shape, range(2))
    prepared.apply(backquant.disable_observer)
    resumed = qat.ours(model, torch.randn(shape))
    resumed.load_state_dict(prepared.state_dict())
    for trained in (prepared, resumed):
        qat.train(trained, shape, range(2, 4))
    qat.equal_states(resumed, prepared)
    switches = [b for n, b in resumed.named_buffers() if n.endswith("observer_enabled")]
    assert switches and not any(b.item() for b in switches)


def test_frozen_batch_norms_are_frozen_again_by_the_user(qat):
    """``freeze_bn`` is no part of PyTorch's state dict; copies and pickles keep it."""
    model, shape = qat.model("residual")
    prepared = qat.ours(model, torch.randn(shape)).apply(freeze_bn_stats)
    for copied in (make(prepared) for make in HOW.values()):
        assert copied.train().get_submodule("stem.0").freeze_bn
        assert not copied.get_submodule("stem.0").bn.training
    resumed = qat.ours(model, torch.randn(shape))
    resumed.load_state_dict(prepared.state_dict())
    assert not resumed.get_submodule("stem.0").freeze_bn


def test_checkpoints_of_torch_can_be_continued(qat, model_name):
    model, shape = qat.model(model_name)
    x = torch.randn(shape)
    theirs = qat.theirs(model, x)
    qat.train(theirs, shape, range(5))
    ours = qat.as_torch(model, model_name, x)
    ours.load_state_dict(theirs.state_dict())
    qat.train_both(ours, theirs, shape, steps=5)
