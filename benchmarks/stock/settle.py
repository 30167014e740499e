"""Random weights that behave like trained ones: nothing multiplies by zero, batch norms fit their inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["call", "settle"]

_SCALES = ("layer_scale", "gamma", "lambda1")


def call(model: Any, inputs: Any) -> Any:
    """``model`` of a copy of a tensor, a tuple of positional or a dict of keyword arguments.

    A copy, because a decoder writes into the cache that it is given. What draws random numbers draws the same
    each time.
    """
    inputs = copy.deepcopy(inputs)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def settle(model: nn.Module, sample: Callable[..., Any], batch: int = 8) -> nn.Module:
    """``model`` in evaluation mode, changed in place.

    1. Scales of residual branches that start near zero become 0.5, batch norms that start at zero 1, and
       layers that start at zero get random weights: untrained, they would hide everything before them.
    2. Batch norms get the statistics of one sample of ``batch``, so that values stay in range.
    3. Those whose inputs vary by less than their epsilon (weights that start small) get factors that make up
       for it: layer by layer, values would vanish.
    """
    _wake(model)
    model.eval()
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    if norms:
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.train().momentum = None  # the mean over all batches
        hooks = [norm.register_forward_pre_hook(_raise) for norm in norms]
        with torch.no_grad():
            call(model, sample(batch))
        for hook in hooks:
            hook.remove()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.eval().momentum = momentum
    return model


def _raise(norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """Rule 3."""
    assert isinstance(norm, _BatchNorm)
    varies = args[0].transpose(0, 1).flatten(1).var(1, unbiased=False)
    if norm.weight is not None and varies.median() < norm.eps:
        factors = ((varies + norm.eps) / varies).sqrt()
        norm.weight.copy_(factors.where(varies > 0, torch.ones(())))


@torch.no_grad()
def _wake(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        scales = name.rpartition(".")[2].startswith(_SCALES)
        if scales and 0 < parameter.abs().max() < 1e-2:
            parameter.fill_(0.5)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.any():
            continue
        if isinstance(module, _BatchNorm):
            weight.fill_(1.0)
        elif weight.dim() > 1:
            nn.init.xavier_uniform_(weight)
