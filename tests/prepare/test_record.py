"""The state survives what people do to prepared models."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backquant.calibrate import calibrate
from backquant.convert import convert_to_reference
from backquant.errors import UsageError
from backquant.prepare import PreparedModule, prepared_state


class Awkward(nn.Module):
    """Names that a second trace would not find again: nodes were fused away between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x, scale: int = 2):
        x = F.relu(torch.add(self.conv(x), 1)) + scale
        x = torch.cat([x, x], 1)[:, :4].mean([2, 3])
        return {"out": F.linear(x, self.weight).reshape(x.size(0), -1)}


def _same(one: PreparedModule, two: PreparedModule) -> None:
    assert [n.name for n in one.graph.nodes] == [n.name for n in two.graph.nodes]
    first, second = prepared_state(one), prepared_state(two)
    assert first.sites == second.sites
    assert first.plan == second.plan
    assert first.backend_config == second.backend_config
    assert first.qconfig_mapping == second.qconfig_mapping
    assert first.provenance == second.provenance
    assert first.scopes == second.scopes


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_keep_the_state_and_calibrate_on(flow, how):
    prepared = flow.prepare(Awkward().eval())
    batches = [torch.randn(2, 3, 6, 6) for _ in range(3)]
    calibrate(prepared, batches[:1])
    if how == "deepcopy":
        copied = copy.deepcopy(prepared)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(prepared))
    else:
        stream = io.BytesIO()
        torch.save(prepared, stream)
        stream.seek(0)
        copied = torch.load(stream, weights_only=False)
    assert isinstance(copied, PreparedModule)
    _same(prepared, copied)
    for model in (prepared, copied):
        calibrate(model, batches[1:])
    one, two = convert_to_reference(prepared), convert_to_reference(copied)
    # A pickled graph loses the annotations of its inputs.
    assert one.code.partition("\n    ")[2] == two.code.partition("\n    ")[2]
    with torch.no_grad():
        assert torch.equal(one(batches[0])["out"], two(batches[0])["out"])


def test_a_copy_measures_for_itself(flow):
    prepared = flow.prepare(Awkward().eval())
    copied = copy.deepcopy(prepared)
    calibrate(copied, [torch.randn(2, 3, 6, 6)])
    assert prepared.activation_post_process_0.min_val == float("inf")
    groups = prepared_state(copied).sites.groups()
    for head, members in groups.items():
        assert all(getattr(copied, name) is getattr(copied, head) for name in members)


def test_names_of_the_state_are_nodes(flow):
    prepared = flow.prepare(Awkward().eval())
    state = prepared_state(prepared)
    names = {node.name for node in prepared.graph.nodes}
    assert set(state.plan.decisions) <= names
    assert {site.name for site in state.sites.sites} <= names
    assert {site.value for site in state.sites.sites} <= names


def test_other_modules_have_no_state():
    with pytest.raises(UsageError, match="not prepared"):
        prepared_state(torch.fx.symbolic_trace(nn.ReLU()))
