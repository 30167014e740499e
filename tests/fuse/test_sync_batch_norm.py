"""SyncBatchNorm is replaced where its dimension is known, and comes back wherever it went."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from backquant.fuse import as_plain, put_back, without_sync
from backquant.nn.intrinsic import ConvBn2d

BEFORE = {
    nn.Linear: ((2, 4), nn.BatchNorm1d),
    nn.Conv1d: ((2, 4, 1), nn.BatchNorm1d),
    nn.Conv2d: ((2, 4, 1), nn.BatchNorm2d),
    nn.Conv3d: ((2, 4, 1), nn.BatchNorm3d),
    nn.ConvTranspose1d: ((2, 4, 1), nn.BatchNorm1d),
    nn.ConvTranspose2d: ((2, 4, 1), nn.BatchNorm2d),
    nn.ConvTranspose3d: ((2, 4, 1), nn.BatchNorm3d),
}


@pytest.mark.parametrize("kind", list(BEFORE), ids=lambda kind: kind.__name__)
def test_the_dimension_is_that_of_what_is_before(kind):
    arguments, plain = BEFORE[kind]
    gm = fx.symbolic_trace(nn.Sequential(kind(*arguments), nn.SyncBatchNorm(4)))
    sync = gm.get_submodule("1")
    made = without_sync(gm)
    assert type(gm.get_submodule("1")) is plain
    assert list(made.values()) == [sync]
    put_back(gm, made)
    assert gm.get_submodule("1") is sync


def test_settings_and_tensors_are_kept():
    sync = nn.SyncBatchNorm(3, eps=0.5, momentum=None, affine=False, track_running_stats=False)
    plain = as_plain(sync.eval(), nn.BatchNorm2d)
    assert (plain.eps, plain.momentum, plain.affine) == (0.5, None, False)
    assert plain.weight is None and plain.running_mean is None
    assert not plain.training and not plain.track_running_stats
    tracked = nn.SyncBatchNorm(3)
    plain = as_plain(tracked, nn.BatchNorm2d)
    assert plain.weight is tracked.weight
    plain(torch.randn(2, 3, 4, 4))
    assert tracked.num_batches_tracked == 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat, self.image = nn.Conv1d(1, 2, 1), nn.Conv2d(1, 2, 1)
        self.sync = nn.SyncBatchNorm(2)
        self.alone = nn.SyncBatchNorm(2)

    def forward(self, x, y):
        x, y = self.sync(self.flat(x)), self.sync(input=self.image(y))
        return self.alone(torch.sin(x)), y


def test_unknown_dimensions_are_left_alone():
    gm = fx.symbolic_trace(Net())
    assert without_sync(gm) == {}
    assert type(gm.sync) is type(gm.alone) is nn.SyncBatchNorm


def test_subclasses_are_left_alone():
    class Mine(nn.SyncBatchNorm):
        pass

    class Leaves(fx.Tracer):
        def is_leaf_module(self, m, name):
            return not isinstance(m, nn.Sequential)

    model = nn.Sequential(nn.Conv2d(1, 2, 1), Mine(2))
    assert without_sync(fx.GraphModule(model, Leaves().trace(model))) == {}


def test_it_comes_back_inside_of_a_fused_module():
    gm = fx.symbolic_trace(nn.Sequential(nn.Conv2d(1, 2, 1), nn.SyncBatchNorm(2)))
    made = without_sync(gm)
    fused = nn.Sequential(ConvBn2d(gm.get_submodule("0"), gm.get_submodule("1")))
    put_back(fused, made)
    assert type(fused[0][1]) is nn.SyncBatchNorm
    assert fused[0][1] in made.values()
