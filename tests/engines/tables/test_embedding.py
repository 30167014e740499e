from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant.qconfig as bq
from backquant.backend_config import BackendConfig, DTypeConfig
from backquant.observe import PerChannelMinMaxObserver, PlaceholderObserver
from backquant.operators import embedding

BYTES, NIBBLES = bq.float_qparams_weight_only_qconfig, bq.float_qparams_weight_only_qconfig_4bit


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 6, mode=mode)

    def forward(self, indices, offsets):
        return self.table(indices, offsets=offsets)


def _mapping(qconfig):
    return bq.QConfigMapping().set_global(qconfig)


@pytest.mark.parametrize("engine", ["x86", "fbgemm", "qnnpack"])
@pytest.mark.parametrize("qconfig", [BYTES, NIBBLES])
@pytest.mark.parametrize("columns", [6, 7])
def test_a_table_becomes_one_kernel(flow, engine, qconfig, columns):
    model, indices = nn.Sequential(nn.Embedding(20, columns)), torch.randint(0, 20, (3, 4))
    with torch.no_grad():
        reference, lowered = flow(model, (indices,), _mapping(qconfig), engine)
        out, expected = lowered.graph_module(indices), reference(indices)
    assert out.shape == expected.shape
    # scales of 4 bits are stored in float16
    assert torch.allclose(out, expected, atol=1e-5 if qconfig is BYTES else 5e-3)
    assert lowered.left_in_float == ()
    size = lowered.graph_module.get_submodule("0").table.numel()
    assert size == 20 * (columns + 8 if qconfig is BYTES else (columns + 1) // 2 + 4)


@pytest.mark.parametrize("qconfig", [BYTES, NIBBLES])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_take_the_sum_or_the_mean(flow, qconfig, mode):
    """PyTorch's lowering sums where the mean is asked for."""
    model = Bags(mode)
    example = (torch.randint(0, 20, (9,)), torch.tensor([0, 4, 4]))
    with torch.no_grad():
        reference, lowered = flow(model, example, _mapping(qconfig), "x86")
        out = lowered.graph_module(*example)
        assert torch.allclose(out, reference(*example), atol=0.02)
    assert len(lowered.kernels) == 1


REFUSED = {
    "max": (nn.EmbeddingBag(20, 6, mode="max"), "mode"),
    "padding": (nn.EmbeddingBag(20, 6, mode="sum", padding_idx=2), "padding-idx"),
    "norm of bags": (nn.EmbeddingBag(20, 6, mode="sum", max_norm=1.0), "max-norm"),
    "norm": (nn.Embedding(20, 6, max_norm=1.0), "max-norm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_would_get_wrong_stays_as_it_is(flow, name):
    table, rule = REFUSED[name]
    indices = torch.randint(0, 20, (3, 4))
    with torch.no_grad():
        reference, lowered = flow(nn.Sequential(table), (indices,), _mapping(BYTES), "fbgemm")
        assert torch.equal(lowered.graph_module(indices), reference(indices))
    assert [reason.rule for reason in lowered.left_in_float] == [rule]


def test_a_padding_index_of_single_rows_changes_nothing_at_inference(flow):
    model, indices = nn.Sequential(nn.Embedding(20, 6, padding_idx=2)), torch.tensor([1, 2, 3])
    with torch.no_grad():
        reference, lowered = flow(model, (indices,), _mapping(BYTES), "fbgemm")
        assert torch.allclose(lowered.graph_module(indices), reference(indices), atol=1e-5)
    assert len(lowered.kernels) == 1


def _custom(weight, dtype):
    config = DTypeConfig(torch.float, torch.float, dtype)
    backend = BackendConfig("custom").set_backend_pattern_configs(embedding.entries([config]))
    return _mapping(bq.QConfig(PlaceholderObserver, weight)), backend


def test_other_tables(flow):
    indices = torch.randint(0, 20, (3, 4))
    signed = PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric
    )
    mapping, backend = _custom(signed, torch.qint8)
    _, lowered = flow(nn.Sequential(nn.Embedding(20, 6)), (indices,), mapping, "fbgemm", backend)
    [reason] = lowered.left_in_float
    assert (reason.rule, reason.asked) == ("weight-dtype", "qint8")
    columns = PerChannelMinMaxObserver.with_args(
        dtype=torch.quint8, qscheme=torch.per_channel_affine, ch_axis=1
    )
    mapping, backend = _custom(columns, torch.quint8)
    _, lowered = flow(nn.Sequential(nn.Embedding(20, 6)), (indices,), mapping, "fbgemm", backend)
    assert [reason.rule for reason in lowered.left_in_float] == ["weight-axis"]


def test_one_scale_for_all_rows(flow):
    from backquant.observe import MinMaxObserver

    mapping, backend = _custom(MinMaxObserver, torch.quint8)
    model, indices = nn.Sequential(nn.Embedding(20, 6)), torch.randint(0, 20, (3, 4))
    with torch.no_grad():
        reference, lowered = flow(model, (indices,), mapping, "fbgemm", backend)
        assert torch.allclose(lowered.graph_module(indices), reference(indices), atol=1e-5)
    assert len(lowered.kernels) == 1


def test_scales_beyond_float16_stay_as_they_are(flow):
    table = nn.Embedding(20, 6)
    table.weight.data *= 1e7
    _, lowered = flow(nn.Sequential(table), (torch.tensor([1]),), _mapping(NIBBLES), "fbgemm")
    [reason] = lowered.left_in_float
    assert (reason.rule, reason.fix) == ("scale", "8 bits")
    _, lowered = flow(nn.Sequential(table), (torch.tensor([1]),), _mapping(BYTES), "fbgemm")
    assert lowered.left_in_float == ()
