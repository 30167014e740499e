"""Static post-training quantization of a small CNN, as the FX guide describes it."""

import copy

import backquant.ao
import torch
import torch.nn as nn
import torch.nn.functional as F
from backquant.ao.quantization import QConfigMapping, get_default_qconfig_mapping
from backquant.ao.quantization.quantize_fx import convert_fx, prepare_fx


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)) + x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        self.block = Block(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.block(self.stem(x))
        x = F.adaptive_avg_pool2d(x, 1)
        return self.head(torch.flatten(x, 1))


def calibrate(model, batches):
    model.eval()
    with torch.no_grad():
        for batch in batches:
            model(batch)


torch.manual_seed(0)
float_model = Net().eval()
data = [torch.randn(8, 3, 32, 32) for _ in range(4)]

# one mapping for the whole model
qconfig_mapping = get_default_qconfig_mapping("x86")
example_inputs = (data[0],)

model_to_quantize = copy.deepcopy(float_model)
prepared_model = prepare_fx(model_to_quantize, qconfig_mapping, example_inputs)
calibrate(prepared_model, data)
quantized_model = convert_fx(prepared_model)

expected, actual = float_model(data[0]), quantized_model(data[0])
error = (expected - actual).norm() / expected.norm()
print(f"relative error {error:.3f}")
assert error < 0.1

# a mapping of one's own: everything but the stem
mapping = (
    QConfigMapping()
    .set_global(backquant.ao.quantization.get_default_qconfig("x86"))
    .set_module_name("stem", None)
)
prepared_again = prepare_fx(float_model, mapping, example_inputs)
calibrate(prepared_again, data)
print(convert_fx(prepared_again)(data[0]).shape)
