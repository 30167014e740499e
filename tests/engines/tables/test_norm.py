from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backquant.lower.kernels.norm import BatchNorm, Norm
from backquant.nn import intrinsic


def _settled(module):
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.running_mean is not None:
            child.running_mean.normal_()
            child.running_var.uniform_(0.5, 2)
        for parameter in child.parameters(recurse=False):
            nn.init.normal_(parameter, 0.5)
    return module.eval()


def _one(tools, op, out):
    def forward(self, x):
        return tools.qdq(op(self, tools.qdq(x, tools.u8)), out)

    return forward


BATCH = [
    (nn.BatchNorm1d(4), 1),
    (nn.BatchNorm2d(4), 2),
    (nn.BatchNorm2d(4, affine=False), 2),
    (nn.BatchNorm3d(4), 3),
    (intrinsic.BNReLU2d(nn.BatchNorm2d(4), nn.ReLU()), 2),
    (intrinsic.BNReLU3d(nn.BatchNorm3d(4), nn.ReLU()), 3),
]
OTHERS = [
    (nn.LayerNorm(7), 2),
    (nn.LayerNorm((6, 7), elementwise_affine=False), 2),
    (nn.GroupNorm(2, 4), 2),
    (nn.InstanceNorm1d(4), 1),
    (nn.InstanceNorm2d(4, affine=True), 2),
    (nn.InstanceNorm3d(4, affine=True), 3),
]


@pytest.mark.parametrize("number", range(len(BATCH) + len(OTHERS)))
@pytest.mark.parametrize("high", [255, 127])
def test_normalisations_run_on_integers(tools, number, high):
    module, dims = [*BATCH, *OTHERS][number]
    module = _settled(copy.deepcopy(module))
    out = tools.qparams(0.04, 60, 0, high)
    reference = tools.trace(_one(tools, lambda m, x: m.op(x), out), op=module)
    lowered = tools.lower(reference)
    assert lowered.left_in_float == ()
    assert len(lowered.kernels) == 1
    x = torch.randn(3, 4, *{1: (7,), 2: (6, 7), 3: (5, 6, 7)}[dims]) * 2
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)
    if dims == 2:
        x = x.contiguous(memory_format=torch.channels_last)
        tools.assert_within(lowered.graph_module(x), reference(x), out.scale)
    [kernel] = [m for m in lowered.graph_module.modules() if isinstance(m, (BatchNorm, Norm))]
    config = json.loads(json.dumps(kernel.artifact_config()))
    again = type(kernel).from_artifact(config, dict(kernel._buffers))
    q = torch.randint(0, 256, x.shape).to(torch.uint8)
    assert torch.equal(again(q), kernel(q))


FUNCTIONS = [
    lambda m, x: F.layer_norm(x, (7,), m.last, m.shift, 1e-3),
    lambda m, x: F.layer_norm(x, [7], weight=m.last),
    lambda m, x: F.layer_norm(x, m.last.shape, m.last),  # nanoGPT's
    lambda m, x: F.group_norm(x, 2, m.channel, m.channel),
    lambda m, x: F.instance_norm(x, weight=m.channel, bias=m.channel),
]


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_functional_forms(tools, number):
    out = tools.qparams(0.04, 60)
    constants = {"last": torch.randn(7), "shift": torch.randn(7), "channel": torch.randn(4)}
    reference = tools.trace(_one(tools, FUNCTIONS[number], out), **constants)
    lowered = tools.lower(reference)
    assert lowered.left_in_float == ()
    x = torch.randn(3, 4, 6, 7) * 2
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)


@pytest.mark.parametrize(
    "function",
    [lambda m, x: F.layer_norm(x, x.shape[-1:]), lambda m, x: F.group_norm(x, x.shape[1])],
)
def test_sizes_that_are_computed_are_refused(tools, function):
    reference = tools.trace(_one(tools, function, tools.u8))
    lowered = tools.lower(reference)
    assert [r.rule for r in lowered.left_in_float] == ["arguments"]
    x = torch.randn(3, 4, 7)
    assert torch.equal(lowered.graph_module(x), reference(x))


def test_norms_that_measure_or_keep_other_statistics_are_refused(tools):
    for module in (
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4, track_running_stats=True),
    ):
        reference = tools.trace(_one(tools, lambda m, x: m.op(x), tools.u8), op=module.eval())
        assert [r.rule for r in tools.lower(reference).left_in_float] == ["statistics"]


def test_a_batch_norm_of_values_far_beyond_its_result_is_refused(tools):
    module = _settled(nn.BatchNorm2d(4))
    module.running_var[2] = 1e-30
    module.eps = 1e-30

    reference = tools.trace(_one(tools, lambda m, x: m.op(x), tools.u8), op=module)
    assert [r.rule for r in tools.lower(reference).left_in_float] == ["kernel-defect"]


def test_a_float_result_is_refused(tools):
    def forward(self, x):
        return self.op(tools.qdq(x, tools.u8))

    reference = tools.trace(forward, op=nn.LayerNorm(7))
    lowered = tools.lower(reference)
    assert [r.rule for r in lowered.left_in_float] == ["float-output"]
    x = torch.randn(3, 7)
    assert torch.allclose(lowered.graph_module(x), reference(x))


def test_a_batch_norm_in_training_mode_applies_what_it_has_stored(tools):
    module = _settled(nn.BatchNorm2d(4)).train()
    reference = tools.trace(_one(tools, lambda m, x: m.op(x), tools.qparams(0.04, 60)), op=module)
    lowered = tools.lower(reference)
    x = torch.randn(3, 4, 5, 5)
    before = module.running_mean.clone()
    tools.assert_within(lowered.graph_module(x), reference.eval()(x), 0.04)
    assert torch.equal(before, module.running_mean)
