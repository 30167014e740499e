import backquant as tq
import os  # two at once
import backquant
import backquant.nn.intrinsic as nni
import backquant.nn.intrinsic.qat as nniqat
import backquant.nn.quantized.reference as nnqr
import backquant.nn.quantized.reference as old_reference
from torch import nn
from backquant.nn import qat
import backquant as qfx
from backquant import qconfig as qc
from backquant.observe import (
    FakeQuantize,  # for training
    default_fake_quant as fake,
)
from backquant.nn.intrinsic import FusedModule


class Pair(FusedModule):
    pass


def one(model, x):
    mapping = tq.QConfigMapping().set_global(tq.default_qconfig)
    prepared = tq.prepare_fx(model, mapping, x)
    return qfx.convert_fx(prepared)


def two(model, x):
    mapping = backquant.get_default_qconfig_mapping("x86")
    prepared = backquant.prepare_fx(model, mapping, x)
    return backquant.convert_fx(prepared), os.getpid()


def three():
    from backquant import MinMaxObserver
    import backquant.observe as obs

    return [
        MinMaxObserver,
        backquant.HistogramObserver.with_args(reduce_range=True),
        obs.PerChannelMinMaxObserver,
        qc.QConfig(activation=fake, weight=FakeQuantize),
        nni.ConvReLU2d,
        nniqat.ConvBn2d,
        nnqr.Linear,
        old_reference.Conv2d,
        qat.Linear,
        backquant.nn.intrinsic.LinearReLU,
        nn.Linear,
        backquant.nn.qat.Conv2d,
    ]
