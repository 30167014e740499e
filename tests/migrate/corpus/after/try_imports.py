try:
    import backquant
    from backquant import QConfigMapping
except ImportError:
    import backquant
    QConfigMapping = None

try:
    import backquant.nn.intrinsic as nni
except ImportError:
    nni = None

HAS_FX = False
try:
    from backquant import prepare_fx as _prepare

    HAS_FX = True
except ImportError:
    _prepare = None

if QConfigMapping is not None:
    import backquant as tq
else:
    import backquant as tq


def fused():
    return () if nni is None else (nni.ConvReLU2d, nni.LinearReLU)


def prepare(model, x):
    if _prepare is None:
        raise RuntimeError("too old")
    return backquant.prepare_fx(model, backquant.QConfigMapping().set_global(tq.default_qconfig), x)
