"""Eager mode, with which some tests compare: PyTorch's own, on a model made of PyTorch's classes.

backquant has no eager mode. What a test prepares and converts beside the model that backquant makes runs on
``torch.ao`` itself; stubs and fused modules of backquant in it become PyTorch's first. QConfigs stay: both
sides measure with the same observers, so that what differs is what the models compute.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.ao.nn.quantized as nnq
import torch.ao.quantization as tq
from torch import nn

import backquant
from backquant.nn.intrinsic import FusedModule
from backquant.nn.quantized import FloatFunctional

__all__ = ["EAGER", "with_torch_classes"]


def with_torch_classes(model: nn.Module) -> nn.Module:
    """A copy of ``model`` without stubs and fused modules of backquant.

    >>> type(with_torch_classes(backquant.QuantStub())).__module__
    'torch.ao.quantization.stubs'
    """
    return _converted(copy.deepcopy(model))


def _converted(module: nn.Module) -> nn.Module:
    for name, child in list(module.named_children()):
        module._modules[name] = _converted(child)
    made = _counterpart(module)
    if made is not module and hasattr(module, "qconfig"):
        made.qconfig = module.qconfig
    return made.train(module.training)


def _counterpart(module: nn.Module) -> Any:
    if isinstance(module, backquant.QuantStub):
        return tq.QuantStub()
    if isinstance(module, backquant.DeQuantStub):
        return tq.DeQuantStub()
    if isinstance(module, FloatFunctional):
        return nnq.FloatFunctional()
    if isinstance(module, FusedModule):
        return backquant.to_torch_ao(type(module))(*module.children())
    return module


def _prepare(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    return tq.prepare(with_torch_classes(model), *args, **kwargs)


def _prepare_qat(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    return tq.prepare_qat(with_torch_classes(model), *args, **kwargs)


#: By the names that tests import.
EAGER: dict[str, Any] = {"prepare": _prepare, "prepare_qat": _prepare_qat, "convert": tq.convert}
