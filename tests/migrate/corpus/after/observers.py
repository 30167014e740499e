"""Observers and modules of one's own, and a model with stubs."""
import backquant.ao
import torch
import backquant.ao
from torch import nn
from backquant.ao.quantization import DeQuantStub, QuantStub, QuantWrapper
from backquant.ao.quantization.observer import ObserverBase, _with_args


class Largest(ObserverBase):
    """Keeps the largest value."""

    with_args = classmethod(_with_args)

    def forward(self, x: torch.Tensor) -> "torch.quantization.MinMaxObserver":
        return x


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.add = backquant.ao.nn.quantized.FloatFunctional()

    def forward(self, x):
        return self.dequant(self.add.add(self.quant(x), x))


wrapped = QuantWrapper(nn.Linear(3, 3))
qconfig = backquant.ao.quantization.QConfig(activation=Largest, weight=backquant.ao.quantization.default_weight_observer)
