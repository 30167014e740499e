from __future__ import annotations

import torch
from torch import nn

from backquant.nn.quantized import reference as nnqr
from backquant.runtime import audit


def test_kernels_boundaries_and_float_operators_are_counted(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        x = tools.qdq(torch.sigmoid(self.fc(x)), tools.u8)
        x = torch.cumsum(x, 0)
        return self.last(x)

    fc = nn.Linear(4, 4)
    reference = tools.trace(
        forward, fc=nnqr.Linear.from_float(fc, tools.weight_qparams(fc)), last=nn.Linear(4, 2)
    )
    found = audit(tools.lower(reference).graph_module)
    assert found.kernels == {"onednn.qlinear_pointwise": 1}
    assert found.integer_kernels == 1
    assert found.float_weighted == ("last",)
    assert (found.quantize, found.dequantize, found.requantize) == (2, 1, 0)
    assert found.joined == ()


def test_a_reference_model_counts_as_float(tools):
    def forward(self, x):
        return tools.qdq(self.fc(tools.qdq(x, tools.u8)), tools.u8)

    fc = nn.Linear(4, 4)
    reference = tools.trace(forward, fc=nnqr.Linear.from_float(fc, tools.weight_qparams(fc)))
    found = audit(reference)
    assert found.float_weighted == ("fc",)
    assert found.integer_kernels == 0
    assert (found.quantize, found.dequantize) == (2, 2)


def test_a_boundary_pair_with_nothing_between_is_reported(tools):
    def forward(self, x):
        return tools.qdq(tools.qdq(x, tools.u8), tools.u8)

    reference = tools.trace(forward)
    assert len(audit(reference).joined) == 1
    assert audit(tools.lower(reference).graph_module).joined == ()
