"""Two gloo ranks under ``DistributedDataParallel``: training as PyTorch's, one converted model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing import spawn

import backquant
from backquant.errors import UsageError

pytestmark = pytest.mark.xdist_group("ranks")  # one worker pays for what they share

KINDS = ["default", "MinMaxObserver", "HistogramObserver"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found. The worker is a module of its own: spawned processes import it."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setenv("OMP_NUM_THREADS", "1")
        worker = importlib.import_module("ranks")
        spawn(worker.run, args=(str(folder),), nprocs=worker.RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(worker.RANKS)]


def _equal(one, two):
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def test_training_equals_torchs(ranks):
    for rank in ranks:
        for ours, theirs in zip(rank["default"]["outputs"], rank["torch"], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_parameters_and_differ_in_what_they_measured(ranks, kind):
    one, two = (rank[kind] for rank in ranks)
    _equal(one["parameters"], two["parameters"])
    measured = [name for name in one["before"] if name.endswith(("_val", "running_mean"))]
    assert not all(torch.equal(one["before"][n], two["before"][n]) for n in measured)


@pytest.mark.parametrize("kind", KINDS)
def test_after_synchronizing_both_convert_to_one_model(ranks, kind):
    one, two = (rank[kind] for rank in ranks)
    _equal(one["after"], two["after"])
    assert one["code"] == two["code"]  # the qparams are literals in it
    _equal(one["state"], two["state"])
    for mine, other in zip(one["converted"], two["converted"], strict=True):
        assert torch.equal(mine, other)


def test_moving_averages_and_statistics_are_those_of_rank_0(ranks):
    for name, value in ranks[0]["default"]["before"].items():
        assert torch.equal(ranks[1]["default"]["after"][name], value), name


def test_minima_and_maxima_are_the_widest(ranks):
    before = [rank["MinMaxObserver"]["before"] for rank in ranks]
    after = ranks[0]["MinMaxObserver"]["after"]
    widened = 0
    for name, value in after.items():
        if name.endswith("min_val"):
            assert torch.equal(value, torch.minimum(before[0][name], before[1][name]))
        elif name.endswith("max_val"):
            assert torch.equal(value, torch.maximum(before[0][name], before[1][name]))
            widened += bool((value > before[0][name]).any())
        elif "activation_post_process_0.scale" in name:
            assert value > before[0][name]  # computed anew
    assert widened


def test_histograms_are_merged(ranks):
    """As one observer that saw the data of both."""
    before = [rank["HistogramObserver"]["before"] for rank in ranks]
    after = ranks[0]["HistogramObserver"]["after"]
    counts = [name for name in after if name.endswith("bin_count")]
    assert counts
    for name in counts:
        assert after[name].sum() == before[0][name].sum() + before[1][name].sum()


def test_ranks_with_different_models_are_refused(ranks):
    for rank in ranks:
        assert "the ranks hold different models" in rank["refused"]


def test_without_ranks_it_is_refused():
    with pytest.raises(UsageError, match="no ranks to synchronize"):
        backquant.api.synchronize_observers(nn.Linear(1, 1))
