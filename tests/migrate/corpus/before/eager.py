"""Eager mode: names change, and nothing else."""
import torch
from torch.ao.quantization import QuantStub, DeQuantStub, get_default_qconfig
from torch.ao.quantization import prepare, convert, fuse_modules


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.dequant(self.fc(self.quant(x)))


torch.backends.quantized.engine = "fbgemm"
model = Model().eval()
model.qconfig = get_default_qconfig("fbgemm")
prepared = prepare(model)
prepared(torch.randn(2, 4))
converted = convert(prepared)
small = torch.ao.quantization.quantize_dynamic(Model(), {torch.nn.Linear}, dtype=torch.qint8)
