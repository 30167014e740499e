"""A state_dict is saved and loaded into a model that was prepared and converted anew, uncalibrated."""

import copy
import io

import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
x = torch.randn(16, 1, 8, 8)
prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (x,))
prepared(x)
quantized = convert_fx(prepared)
file = io.BytesIO()
torch.save(quantized.state_dict(), file)

file.seek(0)
fresh = convert_fx(prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (x,)))
fresh.load_state_dict(torch.load(file, weights_only=False))
assert torch.equal(fresh(x), quantized(x))
outputs = fresh(x)
in_float = model(x)
step = float(fresh.get_submodule("3").scale)
