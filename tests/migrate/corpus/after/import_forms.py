import os, backquant.ao.quantization as tq  # two at once
import torch
import backquant.ao.quantization
import backquant.ao.quantization.quantize_fx
import backquant.ao.nn.intrinsic as nni
import backquant.ao.nn.intrinsic.qat as nniqat
import backquant.ao.nn.quantized.reference as nnqr
import backquant.ao.nn.quantized.reference as old_reference
import backquant.ao
from torch import nn
from backquant.ao import quantization
from backquant.ao.nn import qat
from backquant.ao.quantization import observer, qconfig as qc, quantize_fx as qfx
from backquant.ao.quantization.fake_quantize import (
    FakeQuantize,  # for training
    default_fake_quant as fake,
)
from backquant.ao.nn.intrinsic.modules.fused import _FusedModule


class Pair(_FusedModule):
    pass


def one(model, x):
    mapping = tq.QConfigMapping().set_global(tq.qconfig.default_qconfig)
    prepared = tq.quantize_fx.prepare_fx(model, mapping, x)
    return qfx.convert_fx(prepared)


def two(model, x):
    mapping = backquant.ao.quantization.get_default_qconfig_mapping("x86")
    prepared = backquant.ao.quantization.quantize_fx.prepare_fx(model, mapping, x)
    return quantization.quantize_fx.convert_fx(prepared), os.getpid()


def three():
    from backquant.ao.quantization import MinMaxObserver
    import backquant.ao.quantization.observer as obs

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
        backquant.ao.nn.intrinsic.LinearReLU,
        nn.Linear,
        backquant.ao.nn.qat.Conv2d,
    ]
