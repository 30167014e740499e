from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def test_every_float_operator_has_a_reason_and_sizes_have_none(tools):
    def forward(self, x):
        q = tools.qdq(x, tools.u8)
        n = q.shape[0] * 2 - q.size(1)
        a = torch.cumsum(q, 1)
        b = self.float_conv(x)
        c = F.gelu(b)
        return a, c, n // 2

    reference = tools.trace(forward, float_conv=nn.Conv2d(3, 3, 1))
    found = {reason.node: reason for reason in tools.lower(reference).left_in_float}
    assert {name: reason.rule for name, reason in found.items()} == {
        "cumsum": "no-kernel",
        "float_conv": "float-in-reference",
        "gelu": "float-input",
    }
    assert found["cumsum"].asked == "an integer kernel for cumsum"
    assert found["float_conv"].asked == "an integer kernel for module float_conv"
    assert all(reason.place == "engine x86" for reason in found.values())


def test_several_rules_give_several_reasons(tools):
    def forward(self, x):
        return tools.qdq(torch.relu(tools.qdq(x, tools.u8) + x), tools.u8)

    rules = [r.rule for r in tools.lower(tools.trace(forward)).left_in_float if r.node == "add"]
    assert len(rules) >= 2
    assert set(rules) <= {"float-input", "arguments"}
