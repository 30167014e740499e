# %% [markdown]
# # A chip from its data sheet
# The data sheet: int8 with scales that are powers of two, convolutions up to 3 × 3 in channels of
# multiples of 8, ReLU in the same pass, additions, max pooling. Nothing else.

# %%
from pathlib import Path

import torch
from torch import nn

import backquant

torch.manual_seed(0)
DESCRIPTION = """\
schema_version: 1
name: my_chip
dtype_configs:
  weights:
    input_dtype: {dtype: qint8, power_of_two_scale: true}
    output_dtype: {dtype: qint8, power_of_two_scale: true}
    weight_dtype: {dtype: qint8, quant_min_lower_bound: -127, quant_max_upper_bound: 127,
                   symmetric: true, power_of_two_scale: true, granularity: per_tensor}
  values:
    input_dtype: {dtype: qint8, power_of_two_scale: true}
    output_dtype: {dtype: qint8, power_of_two_scale: true}
entries:
- operators: [conv2d, conv2d+batch_norm2d, conv2d+relu, conv2d+batch_norm2d+relu]
  dtype_configs: [weights]
  where: {kernel_height: {max: 3}, kernel_width: {max: 3}, out_channels: {multiple_of: 8}}
- operators: [linear, linear+relu]
  dtype_configs: [weights]
- operators: [add, max_pool2d, flatten]
  dtype_configs: [values]
"""
Path("my_chip.yaml").write_text(DESCRIPTION)
chip = backquant.BackendConfig.load("my_chip.yaml")
for finding in chip.validate():
    print(finding)

# %% [markdown]
# A model that does not fit in one place: its first kernel is 5 × 5.

# %%
model = nn.Sequential(
    *(nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(1), nn.Linear(256, 10)),
).eval()
x = torch.rand(4, 3, 16, 16)
report = backquant.explain(model, x, backend=chip)
print(report)
first = next(row for row in report.rows if row.module_path == "0")
assert first.outcome == "float" and first.reasons

# %% [markdown]
# Two convolutions of 3 × 3 see as much as one of 5 × 5. Everything fits.

# %%
model[0] = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
model.eval()
quantized = backquant.quantize(
    model, x, backend=chip, calibration=[torch.rand(8, 3, 16, 16) for _ in range(4)]
)
print(quantized.report)
assert quantized(x).shape == (4, 10)

# %% [markdown]
# For the chip's compiler: an ONNX file with QuantizeLinear and DequantizeLinear.

# %%
exported = backquant.export(quantized, "for_the_compiler.onnx", to="qdq-onnx")
print(f"{exported.integer} of {exported.expected} operators quantized")
assert exported.integer == exported.expected
