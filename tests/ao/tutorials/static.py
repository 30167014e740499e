"""Post-training static quantization: prepare, calibrate, convert, look at a layer."""

import copy

import torch
import torch.ao.nn.quantized as nnq
from torch import nn
from torch.ao.quantization import QConfigMapping, default_per_channel_qconfig, default_qconfig
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.skip = nn.Conv2d(8, 8, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv(x)))
        x = x + self.skip(x)
        return self.fc(x.mean((2, 3)))


model = Net().eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(4)]
mapping = (
    QConfigMapping()
    .set_global(default_per_channel_qconfig)
    .set_module_name("skip", default_qconfig)
)
prepared = prepare_fx(copy.deepcopy(model), mapping, (batches[0],))
with torch.no_grad():
    for batch in batches:
        prepared(batch)
quantized = convert_fx(prepared)
assert isinstance(quantized.fc, nnq.Linear), type(quantized.fc)
outputs = quantized(batches[0])
step = quantized.fc.scale
