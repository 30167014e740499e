"""Which observers become nodes, and what their buffers are called."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from backquant.calibrate import calibrate
from backquant.convert import convert_to_reference, reference_state
from backquant.prepare import prepared_state


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return F.linear(torch.sin(self.fc(x)), self.weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x) + 1


def _converted(flow, dialect):
    prepared = flow.prepare(Net().eval())
    calibrate(prepared, [torch.randn(2, 4)])
    return prepared, convert_to_reference(prepared, dialect=dialect)


def test_buffers_tell_what_they_belong_to(flow):
    _, converted = _converted(flow, "quantized_tensor")
    names = [n for n in converted.state_dict() if "_scale_" in n]
    assert names == [
        "block_fc_input_scale_0",
        "block_fc_scale_0",
        "block_scale_0",
        "block_scale_1",
        "block_scale_2",
        "_scale_0",
    ]


def test_every_needed_site_is_one_pair(flow):
    prepared, converted = _converted(flow, "decomposed")
    sites = prepared_state(prepared).sites.sites
    ops = torch.ops.quantized_decomposed
    count = sum(n.target is ops.quantize_per_tensor.default for n in converted.graph.nodes)
    weights = [site for site in sites if site.role.value == "weight"]
    assert len(weights) == 1
    assert count == len(sites) - len(weights)


def test_nodes_come_from_their_site(flow):
    _, converted = _converted(flow, "decomposed")
    provenance = reference_state(converted).provenance
    first = next(n for n in converted.graph.nodes if "quantize" in n.name)
    assert provenance.origins(first.name) == ("x",)
    assert provenance.origins("dequantize_per_tensor_default") == ("x",)
