import importlib
import torch
import backquant
import torch.ao.quantization as tq
import torch.nn.quantized as nnq
import backquant as fx
from backquant import fuse_modules
from torch.ao.quantization import QConfigDynamic, get_default_qat_module_mappings
from torch.ao.quantization.fx._equalize import EqualizationQConfig
from torch.ao.ns._numeric_suite_fx import extract_weights

torch.backends.quantized.engine = "qnnpack"
tq.default_observer = None


def run(model, x, names, flag):
    model = fuse_modules(model, names)
    mapping = backquant.get_default_qconfig_mapping(torch.backends.quantized.engine)
    prepared = fx.prepare_fx(model, mapping, x, _equalization_config=EqualizationQConfig)
    other = fx.prepare_fx(model, mapping)
    third = fx.prepare_fx(model, fx.QConfigMapping().set_global(None), {"preserved_attributes": ["a"]})
    quantized = fx.convert_fx(prepared, is_reference=flag)
    for module in quantized.modules():
        if isinstance(module, (nnq.Linear, backquant.nn.quantized.FloatFunctional)):
            print(module)
    return extract_weights("a", quantized, "b", other), third


def dynamic(name):
    module = importlib.import_module("torch.ao.quantization.observer")
    return getattr(tq, name), module, get_default_qat_module_mappings(), QConfigDynamic
