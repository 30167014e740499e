"""A BackendConfig of one's own: linear layers, alone or with ReLU, in eight bits of which seven are used."""

import torch
import torch.ao.nn.quantized.reference as nnqr
from torch import nn
from torch.ao.nn.intrinsic import LinearReLU
from torch.ao.quantization import MinMaxObserver, QConfig, QConfigMapping
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
)
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

activation = DTypeWithConstraints(
    dtype=torch.quint8, quant_min_lower_bound=0, quant_max_upper_bound=127
)
weight = DTypeWithConstraints(
    dtype=torch.qint8, quant_min_lower_bound=-64, quant_max_upper_bound=63
)
config = DTypeConfig(
    input_dtype=activation,
    output_dtype=activation,
    weight_dtype=weight,
    bias_dtype=torch.float,
)


def fuse_linear_relu(is_qat, linear, relu):
    return LinearReLU(linear, relu)


linear = (
    BackendPatternConfig(nn.Linear)
    .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    .add_dtype_config(config)
    .set_root_module(nn.Linear)
    .set_reference_quantized_module(nnqr.Linear)
)
pair = (
    BackendPatternConfig((nn.Linear, nn.ReLU))
    .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    .add_dtype_config(config)
    .set_fused_module(LinearReLU)
    .set_fuser_method(fuse_linear_relu)
)
fused = (
    BackendPatternConfig(LinearReLU)
    .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    .add_dtype_config(config)
    .set_root_module(nn.Linear)
    .set_reference_quantized_module(nnqr.Linear)
)
backend = BackendConfig("seven bits").set_backend_pattern_configs([linear, pair, fused])

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
x = torch.randn(32, 8)
qconfig = QConfig(
    activation=MinMaxObserver.with_args(quant_min=0, quant_max=127, dtype=torch.quint8),
    weight=MinMaxObserver.with_args(
        quant_min=-64, quant_max=63, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
    ),
)
mapping = QConfigMapping().set_object_type(nn.Linear, qconfig).set_object_type(nn.ReLU, qconfig)
prepared = prepare_fx(model, mapping, (x,), backend_config=backend)
prepared(x)
quantized = convert_fx(prepared, backend_config=backend)
outputs = quantized(x)
step = float(model(x).max() - model(x).min()) / 127
