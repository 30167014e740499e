"""Conv2d (+ BatchNorm2d) + add (+ ReLU) as one kernel, and the functions that its entries name.

The patterns are graphs, not sequences: the other operand of the addition may be anything. They
are written in the reversed nested form, so their fusers and getters take their parts in it too:

1. ``left``: the convolution is the first operand: ``(add, conv, MatchAllNode)``.
2. ``right``: it is the second: ``(add, MatchAllNode, conv)``.
3. ``conv`` may stand for ``(BatchNorm2d, Conv2d)``; a ReLU behind wraps all of it:
   ``(ReLU, (add, …))``.

The root is the convolution, whose input the fused module takes first; the other operand is its
second input. Batch norm is folded for inference only; there is no form for training, where
convolution and batch norm are fused without the addition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from backquant.backend_config import (
    BackendPatternConfig,
    DTypeConfig,
    MatchAllNode,
    ObservationType,
    folds_for_inference_only,
)
from backquant.errors import ConfigError
from backquant.nn import intrinsic
from backquant.nn.intrinsic import fusers
from backquant.nn.quantized import reference
from backquant.operators.entry import admit, swapped

_BN_CONV = (nn.BatchNorm2d, nn.Conv2d)


def _conv_of(operand: Any) -> Any:
    """The convolution of an operand: itself, or the last part of ``(batch_norm, conv)``."""
    return operand[-1] if isinstance(operand, tuple) else operand


def _folded(is_qat: bool, operand: Any) -> nn.Module:
    """The convolution of an operand, with the batch norm behind it (if any) folded in."""
    if not isinstance(operand, tuple):
        conv: nn.Module = operand
        return conv
    batch_norm, conv = operand
    if is_qat:
        raise ConfigError(
            "convolution + batch norm + add has no module for training",
            where=f"{type(conv).__name__}, {type(batch_norm).__name__}, add",
            fix="fuse for inference, or train with a backend that fuses no addition",
        )
    folded: nn.Module = fusers.fuse_conv_bn(False, conv, batch_norm)
    return folded


@folds_for_inference_only
def fuse_left(is_qat: bool, add: Any, conv: Any, _other: Any) -> nn.Module:
    """``conv(x) + y`` as ``ConvAdd2d``; ``conv`` is a module or ``(batch_norm, conv)``.

    >>> fuse_left(False, torch.add, nn.Conv2d(1, 1, 1), None).__class__.__name__
    'ConvAdd2d'
    """
    return intrinsic.ConvAdd2d(_folded(is_qat, conv), add)


@folds_for_inference_only
def fuse_right(is_qat: bool, add: Any, _other: Any, conv: Any) -> nn.Module:
    """``y + conv(x)`` as ``ConvAdd2d``.

    >>> fuse_right(False, torch.add, None, nn.Conv2d(1, 1, 1)).__class__.__name__
    'ConvAdd2d'
    """
    return intrinsic.ConvAdd2d(_folded(is_qat, conv), add)


@folds_for_inference_only
def fuse_left_relu(is_qat: bool, relu: nn.Module, added: tuple[Any, Any, Any]) -> nn.Module:
    """``relu(conv(x) + y)`` as ``ConvAddReLU2d``.

    >>> added = (torch.add, nn.Conv2d(1, 1, 1), None)
    >>> fuse_left_relu(False, nn.ReLU(), added).__class__.__name__
    'ConvAddReLU2d'
    """
    add, conv, _ = added
    return intrinsic.ConvAddReLU2d(_folded(is_qat, conv), add, relu)


@folds_for_inference_only
def fuse_right_relu(is_qat: bool, relu: nn.Module, added: tuple[Any, Any, Any]) -> nn.Module:
    """``relu(y + conv(x))`` as ``ConvAddReLU2d``.

    >>> added = (torch.add, None, nn.Conv2d(1, 1, 1))
    >>> fuse_right_relu(False, nn.ReLU(), added).__class__.__name__
    'ConvAddReLU2d'
    """
    add, _, conv = added
    return intrinsic.ConvAddReLU2d(_folded(is_qat, conv), add, relu)


def root_left(pattern: tuple[Any, Any, Any]) -> Any:
    """The convolution's node in ``(add, conv, other)``.

    >>> root_left(("add", ("bn", "conv"), "y"))
    'conv'
    """
    return _conv_of(pattern[1])


def root_right(pattern: tuple[Any, Any, Any]) -> Any:
    """The convolution's node in ``(add, other, conv)``.

    >>> root_right(("add", "y", "conv"))
    'conv'
    """
    return _conv_of(pattern[2])


def root_left_relu(pattern: tuple[Any, tuple[Any, Any, Any]]) -> Any:
    """The convolution's node in ``(relu, (add, conv, other))``.

    >>> root_left_relu(("relu", ("add", "conv", "y")))
    'conv'
    """
    return root_left(pattern[1])


def root_right_relu(pattern: tuple[Any, tuple[Any, Any, Any]]) -> Any:
    """The convolution's node in ``(relu, (add, other, conv))``.

    >>> root_right_relu(("relu", ("add", "y", ("bn", "conv"))))
    'conv'
    """
    return root_right(pattern[1])


def extra_inputs_left(pattern: tuple[Any, Any, Any]) -> list[Any]:
    """The other operand of ``(add, conv, other)``.

    >>> extra_inputs_left(("add", "conv", "y"))
    ['y']
    """
    return [pattern[2]]


def extra_inputs_right(pattern: tuple[Any, Any, Any]) -> list[Any]:
    """The other operand of ``(add, other, conv)``.

    >>> extra_inputs_right(("add", "y", "conv"))
    ['y']
    """
    return [pattern[1]]


def extra_inputs_left_relu(pattern: tuple[Any, tuple[Any, Any, Any]]) -> list[Any]:
    """The other operand of ``(relu, (add, conv, other))``.

    >>> extra_inputs_left_relu(("relu", ("add", "conv", "y")))
    ['y']
    """
    return extra_inputs_left(pattern[1])


def extra_inputs_right_relu(pattern: tuple[Any, tuple[Any, Any, Any]]) -> list[Any]:
    """The other operand of ``(relu, (add, other, conv))``.

    >>> extra_inputs_right_relu(("relu", ("add", "y", "conv")))
    ['y']
    """
    return extra_inputs_right(pattern[1])


def entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """The 16 patterns and the two fused modules.

    >>> len(entries([DTypeConfig(torch.quint8, torch.quint8, torch.qint8)]))
    18
    """
    rows = [
        *_sides((fuse_left, root_left, extra_inputs_left), _left),
        *_sides((fuse_right, root_right, extra_inputs_right), _right),
        swapped(intrinsic.ConvAdd2d, nn.Conv2d, reference.Conv2d),
        *_sides((fuse_left_relu, root_left_relu, extra_inputs_left_relu), _left_relu),
        *_sides((fuse_right_relu, root_right_relu, extra_inputs_right_relu), _right_relu),
        swapped(intrinsic.ConvAddReLU2d, nn.Conv2d, reference.Conv2d),
    ]
    return admit(rows, dtype_configs)


_Pattern = tuple[Any, ...]
_Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def _left(add: Any, conv: Any) -> tuple[_Pattern, type[nn.Module]]:
    return (add, conv, MatchAllNode), intrinsic.ConvAdd2d


def _right(add: Any, conv: Any) -> tuple[_Pattern, type[nn.Module]]:
    return (add, MatchAllNode, conv), intrinsic.ConvAdd2d


def _left_relu(add: Any, conv: Any) -> tuple[_Pattern, type[nn.Module]]:
    return (nn.ReLU, _left(add, conv)[0]), intrinsic.ConvAddReLU2d


def _right_relu(add: Any, conv: Any) -> tuple[_Pattern, type[nn.Module]]:
    return (nn.ReLU, _right(add, conv)[0]), intrinsic.ConvAddReLU2d


def _sides(
    functions: _Functions, shape: Callable[[Any, Any], tuple[_Pattern, type[nn.Module]]]
) -> list[BackendPatternConfig]:
    """One side: with batch norm before without, each for both spellings of the addition."""
    fuser, root, extra_inputs = functions
    rows = []
    for conv in (_BN_CONV, nn.Conv2d):
        for add in (torch.add, operator.add):
            pattern, fused = shape(add, conv)
            rows.append(
                BackendPatternConfig()
                ._set_pattern_complex_format(pattern)
                .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
                .set_fused_module(fused)
                .set_fuser_method(fuser)
                ._set_root_node_getter(root)
                ._set_extra_inputs_getter(extra_inputs)
            )
    return rows
