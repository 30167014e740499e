"""More through ``convert_fx``: tests/api/custom."""

from __future__ import annotations

import torch
from torch import nn

from backquant.convert import convert_to_reference, dequantize_all
from backquant.nn import quantizable, quantized


def test_nested_tuples() -> None:
    q = torch.quantize_per_tensor(torch.tensor([0.4, 1.0]), 0.5, 0, torch.quint8)
    plain = torch.ones(1, dtype=torch.int64)
    output, (hidden, other), number = dequantize_all((q, [q, plain], 3))
    assert output.tolist() == hidden.tolist() == [0.5, 1.0]
    assert other is plain and number == 3


def test_our_classes_take_floats() -> None:
    for cls in (quantized.LSTM, quantized.LSTMCell, quantized.MultiheadAttention):
        assert cls.float_interface
    for cls in (quantizable.LSTM, nn.Linear):
        assert not getattr(cls, "float_interface", False)


def test_an_unobserved_quantizable_module_is_left_alone(flow) -> None:
    """It stood in the model and no config names it: an operator without an entry."""
    model = nn.Sequential(quantizable.LSTMCell(4, 4))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = model[0]
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.cell(x)[0])

    prepared = flow.prepare(Net().eval())
    x = torch.randn(3, 4)
    prepared(x)
    reference = convert_to_reference(prepared)
    assert type(reference.cell) is quantizable.LSTMCell
