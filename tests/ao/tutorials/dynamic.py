"""Post-training dynamic quantization of linear layers: nothing is calibrated."""

import torch
from torch import nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
x = torch.randn(8, 32)
mapping = QConfigMapping().set_global(default_dynamic_qconfig)
quantized = convert_fx(prepare_fx(model, mapping, (x,)))
outputs = quantized(x)
step = float(model(x).abs().max()) / 127
