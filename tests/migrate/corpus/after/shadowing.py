import backquant as bq
import torch
from backquant import observe as observer
from torch.ao.quantization import prepare_fx_of_mine
from backquant import prepare_fx


def hidden(torch, observer):
    return torch.ao.quantization.QConfig, observer.MinMaxObserver


def local():
    prepare_fx = print
    backquant = 3
    return prepare_fx(backquant, {"": None})


class Holder:
    prepare_fx = None
    config = bq.default_qconfig

    def prepare(self, model, x):
        QConfigMapping = dict
        self.prepare_fx = observer.MinMaxObserver
        return prepare_fx(model, bq.QConfigMapping().set_global(self.config), x, QConfigMapping())


from .quantization import convert_fx
from .torch.ao import quantization

convert_fx(quantization.convert)
