try:
    from backquant.ao.quantization import quantize_fx
    from backquant.ao.quantization import QConfigMapping
except ImportError:
    from backquant.ao.quantization import quantize_fx
    QConfigMapping = None

try:
    import backquant.ao.nn.intrinsic as nni
except ImportError:
    nni = None

HAS_FX = False
try:
    from backquant.ao.quantization.quantize_fx import prepare_fx as _prepare

    HAS_FX = True
except ImportError:
    _prepare = None

if QConfigMapping is not None:
    import backquant.ao.quantization as tq
else:
    import backquant.ao.quantization as tq


def fused():
    return () if nni is None else (nni.ConvReLU2d, nni.LinearReLU)


def prepare(model, x):
    if _prepare is None:
        raise RuntimeError("too old")
    return quantize_fx.prepare_fx(model, {"": tq.default_qconfig}, x)
