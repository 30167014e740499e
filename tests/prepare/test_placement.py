"""Where observers stand: equal to PyTorch's, and better where PyTorch is wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from backquant.match import Outcome
from backquant.prepare import prepared_state

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.linear = nn.Linear(4, 4)
        self.embedding = nn.Embedding(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.sigmoid = nn.Sigmoid()


class TwoReaders(Base):
    def forward(self, x):
        return self.conv(x) + self.conv(x)


class SameValueTwice(Base):
    def forward(self, x):
        return torch.add(x, x), torch.cat([x, x], 1)


class Scalars(Base):
    def forward(self, x):
        return F.relu(self.conv(x) + 1) * 2


class Sizes(Base):
    def forward(self, x):
        x = self.conv(x)
        return x.view(x.size(0), -1, x.shape[2] * x.shape[3]).permute(0, 2, 1)


class Mask(Base):
    def forward(self, x):
        x = self.conv(x)
        return x.masked_fill(x > 0, 0.0) + 1


class Kwargs(Base):
    def forward(self, x):
        x = F.max_pool2d(self.conv(x), kernel_size=2)
        return F.linear(torch.flatten(x, 1)[:, :4], weight=self.weight, bias=None)


class FloatBetween(Base):
    def forward(self, x):
        return self.conv(torch.sin(self.conv(x)))


class TransposedWeight(Base):
    def forward(self, x):
        return F.linear(x.mean([2, 3]), self.weight.t())


class NormWeight(Base):
    def forward(self, x):
        return F.layer_norm(self.linear(x.mean([2, 3])), (4,), weight=self.weight[0])


class Containers(Base):
    def forward(self, x):
        y = self.conv(x)
        return {"a": y, "b": [y.sum(), (torch.relu(y), None)]}


class Chunks(Base):
    def forward(self, x):
        a, b = torch.chunk(self.conv(x), 2, 1)
        return torch.cat([b, a], 1)


class PooledCat(Base):
    def forward(self, x):
        x = self.conv(x)
        return torch.cat([x, F.max_pool2d(x, 1), self.conv(x)], 1)


class Skipped(Base):
    def forward(self, x):
        return self.sigmoid(self.linear(self.conv(x).mean([2, 3])))


EQUAL = [
    TwoReaders,
    SameValueTwice,
    Scalars,
    Sizes,
    Mask,
    Kwargs,
    FloatBetween,
    TransposedWeight,
    NormWeight,
    Containers,
    Chunks,
    PooledCat,
    Skipped,
]


@pytest.mark.parametrize("model", EQUAL, ids=lambda cls: cls.__name__)
def test_equal_to_torch(flow, model):
    model, x = model().eval(), torch.randn(2, 4, 6, 6)
    theirs, ours = flow.torch_prepare(model, x), flow.prepare(model)
    assert ours.code == theirs.code
    assert flow.observers(ours) == flow.observers(theirs)


def test_skipped_modules_are_not_observed(flow):
    model, x = Skipped().eval(), torch.randn(2, 4, 6, 6)
    mapping = flow.mapping().set_module_name("linear", None)
    theirs = flow.torch_prepare(
        model, x, mapping=flow.torch_mapping().set_module_name("linear", None)
    )
    ours = flow.prepare(model, mapping)
    readers = [name for site in prepared_state(ours).sites.sites for name in site.readers]
    assert "linear" not in readers
    # The sigmoid of a float value is where we differ; up to there the graphs are one.
    assert ours.code.split("sigmoid")[0].count("self.") == theirs.code.split("sigmoid")[0].count(
        "self."
    )


def test_indexed_arguments_are_not_observed(flow):
    sites = prepared_state(flow.prepare(Mask().eval())).sites.sites
    assert not any(site.value.startswith("gt") for site in sites)


def test_sites_name_producer_readers_and_group(flow):
    state = prepared_state(flow.prepare(PooledCat().eval()))
    by_producer = {site.producer: site for site in state.sites.sites}
    conv, pool, cat = by_producer["conv"], by_producer["max_pool2d"], by_producer["cat"]
    assert conv.readers == ("max_pool2d", "conv_1", "cat")
    assert pool.group == cat.group == conv.name
    assert state.sites.groups()[conv.name] == (
        conv.name,
        pool.name,
        by_producer["conv_1"].name,
        cat.name,
    )
    assert state.provenance.origins(conv.name) == ("conv",)


# -- where we differ on purpose: PyTorch's result, and why it is wrong ---------------------------------


class ReshapedInput(Base):
    def forward(self, x):
        return self.linear(x.reshape(-1, 4))


def test_input_behind_an_unshared_reshape_is_observed(flow):
    model, x = ReshapedInput().eval(), torch.randn(2, 4)
    theirs, ours = flow.torch_prepare(model, x), flow.prepare(model)
    assert "self.l" in theirs.code and "linear = self.linear(reshape)" in theirs.code  # in float
    assert "linear = self.linear(activation_post_process_1)" in ours.code
    state = prepared_state(ours)
    decision = state.plan.decisions["reshape"]
    assert decision.outcome is Outcome.FLOAT
    assert decision.reasons[-1].rule == "nothing-to-share"
    assert state.plan.decisions["linear"].quantized


class Unrelated(Base):
    def forward(self, x):
        return self.linear((self.conv(x) / 100).reshape(-1, 4))


def _read_by_linear(reference: fx.GraphModule, x: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    reference.linear.register_forward_hook(lambda module, args, result: seen.append(args[0]))
    with torch.no_grad():
        reference(x)
    return seen[0]


def _noise(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).square().mean() / expected.square().mean())


def test_no_observer_of_an_unrelated_value_is_adopted(flow):
    model, x = Unrelated().eval(), torch.randn(2, 4, 6, 6)
    theirs = flow.torch_prepare(model, x)
    adopted = {name: first for name, first, _ in flow.observers(theirs)}
    assert adopted["activation_post_process_2"] == "activation_post_process_1"
    # The adopted range is that of the convolution, a hundred times too wide for the quotient.
    read = [
        _read_by_linear(reference, x) for reference in (flow.theirs(model, x), flow.ours(model, x))
    ]
    expected = (model.conv(x) / 100).reshape(-1, 4).detach()
    theirs_noise, ours_noise = (_noise(value, expected) for value in read)
    assert theirs_noise > 100 * ours_noise


class PoolAndCat(Base):
    def forward(self, x):
        x = self.conv(x)
        y = self.conv(F.max_pool2d(x, 3, 1, 1))
        return torch.cat([y, x], 1)


def test_groups_are_joined_as_a_whole(flow):
    model, x = PoolAndCat().eval(), torch.randn(2, 4, 6, 6)
    theirs, ours = flow.torch_prepare(model, x), flow.prepare(model)
    assert ours.code == theirs.code
    broken = {name: first for name, first, _ in flow.observers(theirs)}
    pool = "activation_post_process_2"
    assert broken[pool] == pool  # PyTorch: the pool's output no longer has its input's qparams
    whole = {name: first for name, first, _ in flow.observers(ours)}
    assert len({whole[f"activation_post_process_{i}"] for i in (1, 2, 3, 4)}) == 1


class FixedCat(Base):
    def forward(self, x):
        y = self.linear(x)
        return torch.cat([self.sigmoid(y), 5 * y], 1)


class FixedInput(Base):
    def forward(self, x):
        return self.sigmoid(torch.sin(self.linear(x)))


@pytest.mark.parametrize("model", [FixedCat, FixedInput], ids=lambda c: c.__name__)
def test_fixed_ranges_do_not_spread(flow, model):
    model, x = model().eval(), 2 * torch.randn(16, 4)
    expected = model(x).detach()
    ours = _noise(flow.ours(model, x)(x), expected)
    assert ours < 0.02
    assert _noise(flow.theirs(model, x)(x), expected) > 3 * ours


def test_fixed_ranges_are_kept_by_what_only_rearranges(flow):
    class Rearranged(Base):
        def forward(self, x):
            return torch.flatten(self.sigmoid(self.conv(x)), 1)

    model, x = Rearranged().eval(), torch.randn(2, 4, 6, 6)
    theirs, ours = flow.torch_prepare(model, x), flow.prepare(model)
    assert ours.code == theirs.code
    assert flow.observers(ours) == flow.observers(theirs)
    assert flow.observers(ours)[-1][2] == "FixedQParamsObserver"
