"""A backend of one's own: linear and convolution with ReLU, with constraints on the weight."""

import backquant.ao
import torch
from backquant.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_weight_observer,
    get_default_qconfig_mapping,
)
from backquant.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
)
from backquant.ao.quantization.quantize_fx import convert_fx, prepare_fx

# What the accelerator can do: activations of 7 bits, symmetric weights.
quint8_with_constraints = DTypeWithConstraints(
    dtype=torch.quint8,
    quant_min_lower_bound=0,
    quant_max_upper_bound=255,
    scale_min_lower_bound=2**-12,
)
weighted_int8_dtype_config = DTypeConfig(
    input_dtype=quint8_with_constraints,
    output_dtype=quint8_with_constraints,
    weight_dtype=torch.qint8,
    bias_dtype=torch.float,
)


def fuse_conv2d_relu(is_qat, conv, relu):
    """The fused module that runs convolution and ReLU at once."""
    return backquant.ao.nn.intrinsic.ConvReLU2d(conv, relu)


linear_config = (
    BackendPatternConfig(torch.nn.Linear)
    .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    .add_dtype_config(weighted_int8_dtype_config)
    .set_root_module(torch.nn.Linear)
    .set_qat_module(backquant.ao.nn.qat.Linear)
    .set_reference_quantized_module(backquant.ao.nn.quantized.reference.Linear)
)
conv_relu_config = (
    BackendPatternConfig((torch.nn.Conv2d, torch.nn.ReLU))
    .add_dtype_config(weighted_int8_dtype_config)
    .set_fused_module(backquant.ao.nn.intrinsic.ConvReLU2d)
    .set_fuser_method(fuse_conv2d_relu)
)
fused_conv_relu_config = (
    BackendPatternConfig(backquant.ao.nn.intrinsic.ConvReLU2d)
    .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    .add_dtype_config(weighted_int8_dtype_config)
    .set_root_module(torch.nn.Conv2d)
    .set_qat_module(backquant.ao.nn.intrinsic.qat.ConvReLU2d)
    .set_reference_quantized_module(backquant.ao.nn.quantized.reference.Conv2d)
)
backend_config = (
    BackendConfig("my_accelerator")
    .set_backend_pattern_config(linear_config)
    .set_backend_pattern_config(conv_relu_config)
    .set_backend_pattern_config(fused_conv_relu_config)
)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.relu = torch.nn.ReLU()
        self.sigmoid = torch.nn.Sigmoid()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):
        x = self.relu(self.conv(x))
        return self.linear(self.sigmoid(x).mean(dim=(2, 3)))


# What the user asks for; the scale's lower bound has to be asked for, too.
activation = MinMaxObserver.with_args(quant_min=0, quant_max=127, eps=2**-12)
qconfig = QConfig(activation=activation, weight=default_weight_observer)
qconfig_mapping = QConfigMapping().set_global(qconfig)

torch.manual_seed(0)
model = Model().eval()
example_inputs = (torch.rand(4, 3, 16, 16),)
prepared = prepare_fx(model, qconfig_mapping, example_inputs, backend_config=backend_config)
prepared(*example_inputs)  # calibration
converted = convert_fx(prepared, backend_config=backend_config)
kinds = sorted(type(module).__name__ for module in converted.modules())
print(kinds)
print(converted(*example_inputs).shape, len(get_default_qconfig_mapping("x86").to_dict()) > 0)
