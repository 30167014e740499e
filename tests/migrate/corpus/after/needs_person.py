import importlib
import torch
import backquant.ao.quantization as tq
import backquant.ao.nn.quantized as nnq
import backquant.ao.quantization.quantize_fx as fx
from backquant.ao.quantization import QConfigDynamic, fuse_modules, get_default_qat_module_mappings
from backquant.ao.quantization.fx._equalize import EqualizationQConfig
from torch.ao.ns._numeric_suite_fx import extract_weights

torch.backends.quantized.engine = "qnnpack"
tq.default_observer = None


def run(model, x, names, flag):
    model = fuse_modules(model, names)
    mapping = tq.get_default_qconfig_mapping(torch.backends.quantized.engine)
    prepared = fx.prepare_fx(model, mapping, x, _equalization_config=EqualizationQConfig)
    other = fx.prepare_fx(model, mapping)
    third = fx.prepare_fx(model, {"": None}, {"preserved_attributes": ["a"]})
    quantized = fx.convert_fx(prepared, is_reference=flag)
    for module in quantized.modules():
        if isinstance(module, (nnq.Linear, nnq.FloatFunctional)):
            print(module)
    return extract_weights("a", quantized, "b", other), third


def dynamic(name):
    module = importlib.import_module("torch.ao.quantization.observer")
    return getattr(tq, name), module, get_default_qat_module_mappings(), QConfigDynamic
