import torch
from backquant.ao.quantization import *
from backquant.ao.quantization.quantize_fx import *


def run(model, x):
    mapping = QConfigMapping().set_global(get_default_qconfig("x86"))
    model = fuse_modules(model, [["conv", "relu"]])
    return convert_fx(prepare_fx(model, mapping, (torch.zeros_like(x),)))
