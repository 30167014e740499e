"""PyTorch 1.12 and 1.13: reversed patterns."""
import torch
import torch.nn as nn
import backquant.ao.nn.intrinsic as nni
from backquant.ao.quantization.backend_config import BackendConfig, BackendPatternConfig
from backquant.ao.quantization.quantize_fx import prepare_fx


def fuse(is_qat, relu, conv):
    return nni.ConvReLU2d(conv, relu)


reversed_config = BackendPatternConfig((nn.ReLU, nn.Conv2d)).set_fuser_method(fuse)
nested_config = BackendPatternConfig((nn.ReLU, (torch.add, nn.Conv2d, nn.Identity)))
forward_config = BackendPatternConfig((nn.Linear, nn.ReLU))


def run(model, mapping, x):
    backend_config_dict = {
        "name": "mine",
        "configs": [
            {"pattern": (nn.ReLU, nn.Conv2d), "fuser_method": fuse},
            {"pattern": nn.Linear},
        ],
    }
    prepare_fx(model, mapping, x, backend_config_dict=backend_config_dict)
    fuse_custom = {"additional_fuser_method_mapping": {(nn.Conv2d, nn.ReLU): fuse}}
    custom = {
        "float_to_observed_custom_module_class": {"static": {nn.LSTM: nn.LSTM}},
        "standalone_module_name": [("a", {"": None}, {})],
        "additional_quant_pattern": {},
    }
    return prepare_fx(model, mapping, x, custom), fuse_custom
