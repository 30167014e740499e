import os, torch.ao.quantization as tq  # two at once
import torch
import torch.ao.quantization
import torch.ao.quantization.quantize_fx
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.qat as nniqat
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.quantized._reference as old_reference
from torch import nn
from torch.ao import quantization
from torch.ao.nn import qat
from torch.ao.quantization import observer, qconfig as qc, quantize_fx as qfx
from torch.ao.quantization.fake_quantize import (
    FakeQuantize,  # for training
    default_fake_quant as fake,
)
from torch.nn.intrinsic.modules.fused import _FusedModule


class Pair(_FusedModule):
    pass


def one(model, x):
    mapping = tq.QConfigMapping().set_global(tq.qconfig.default_qconfig)
    prepared = tq.quantize_fx.prepare_fx(model, mapping, x)
    return qfx.convert_fx(prepared)


def two(model, x):
    mapping = torch.ao.quantization.get_default_qconfig_mapping("x86")
    prepared = torch.ao.quantization.quantize_fx.prepare_fx(model, mapping, x)
    return quantization.quantize_fx.convert_fx(prepared), os.getpid()


def three():
    from torch.ao.quantization import MinMaxObserver
    import torch.quantization.observer as obs

    return [
        MinMaxObserver,
        observer.HistogramObserver.with_args(reduce_range=True),
        obs.PerChannelMinMaxObserver,
        qc.QConfig(activation=fake, weight=FakeQuantize),
        nni.ConvReLU2d,
        nniqat.ConvBn2d,
        nnqr.Linear,
        old_reference.Conv2d,
        qat.Linear,
        nn.intrinsic.LinearReLU,
        nn.Linear,
        torch.nn.qat.Conv2d,
    ]
