import torch
from backquant import QConfigMapping, fuse_modules, get_default_qconfig
from backquant import convert_fx, prepare_fx


def run(model, x):
    mapping = QConfigMapping().set_global(get_default_qconfig("x86"))
    model = fuse_modules(model, [["conv", "relu"]])
    return convert_fx(prepare_fx(model, mapping, (torch.zeros_like(x),)))
