import torch
from backquant.ao.quantization import observer, prepare_fx_of_mine
from backquant.ao.quantization.quantize_fx import prepare_fx


def hidden(torch, observer):
    return torch.ao.quantization.QConfig, observer.MinMaxObserver


def local():
    prepare_fx = print
    backquant = 3
    return prepare_fx(backquant, {"": None})


class Holder:
    prepare_fx = None
    config = torch.ao.quantization.default_qconfig

    def prepare(self, model, x):
        QConfigMapping = dict
        self.prepare_fx = observer.MinMaxObserver
        return prepare_fx(model, {"": self.config}, x, QConfigMapping())


from .quantization import convert_fx
from .torch.ao import quantization

convert_fx(quantization.convert)
