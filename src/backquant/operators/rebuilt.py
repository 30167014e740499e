"""Modules from calls: for exported programs, which hold the tensors of a model and not its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from backquant.operators.index import find

__all__ = ["rebuilt_module"]

_aten = torch.ops.aten


def rebuilt_module(
    overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> nn.Module | None:
    """The module that does what the call does to its first argument, with the tensors of the call.

    Args:
        overload: an aten operator.
        args, kwargs: of the call; tensors where the model's own stand, anything else for the input.

    Returns ``None`` for an operator without such a module, or with a computed weight.

    >>> weight = torch.ones(3, 2)
    >>> module = rebuilt_module(_aten.linear.default, ("x", weight), {})
    >>> module, module.weight.data_ptr() == weight.data_ptr()
    (Linear(in_features=2, out_features=3, bias=False), True)
    """
    build = _BUILDERS.get(overload)
    if build is not None:
        return build(*args, **kwargs)
    known = find(overload)
    if known is None or known.as_module is None:
        return None
    return known.as_module(*args[1:], **kwargs)


def _parameter(value: Any) -> nn.Parameter | None:
    if value is None or isinstance(value, nn.Parameter):
        return value
    return nn.Parameter(value, requires_grad=False)


def _given(*values: Any) -> bool:
    """Whether these are tensors of the model, or absent."""
    return all(value is None or isinstance(value, torch.Tensor) for value in values)


def _filled(module: nn.Module, **tensors: Any) -> nn.Module:
    for name, value in tensors.items():
        setattr(module, name, _parameter(value))
    return module


def _linear(_: Any, weight: Any, bias: Any = None) -> nn.Module | None:
    if not _given(weight, bias):
        return None
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    return _filled(made, weight=weight, bias=bias)


def _conv(kind: type[nn.Module]) -> Callable[..., nn.Module | None]:
    # size: the overload's arguments
    def build(
        _: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> nn.Module | None:  # fmt: skip
        if not _given(weight, bias):
            return None
        made = kind(
            weight.shape[1] * groups,
            weight.shape[0],
            tuple(weight.shape[2:]),
            _sizes(stride),
            padding if isinstance(padding, str) else _sizes(padding),
            _sizes(dilation),
            groups,
            bias is not None,
            device="meta",
        )
        return _filled(made, weight=weight, bias=bias)

    return build


def _conv_transposed(kind: type[nn.Module]) -> Callable[..., nn.Module | None]:
    # size: the overload's arguments
    def build(
        _: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
    ) -> nn.Module | None:  # fmt: skip
        if not _given(weight, bias):
            return None
        made = kind(
            weight.shape[0],
            weight.shape[1] * groups,
            tuple(weight.shape[2:]),
            _sizes(stride),
            _sizes(padding),
            _sizes(output_padding),
            groups,
            bias is not None,
            _sizes(dilation),
            device="meta",
        )
        return _filled(made, weight=weight, bias=bias)

    return build


def _sizes(value: Any) -> Any:
    """A tuple, or one number for all dimensions."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values[0] if len(values) == 1 else values


_BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


# size: the overload's arguments
def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float,
    _: bool = False,
) -> nn.Module | None:  # fmt: skip
    value = getattr(x, "meta", {}).get("val")
    kind = _BATCH_NORMS.get(value.dim()) if isinstance(value, torch.Tensor) else None
    if training or kind is None or mean is None or not _given(weight, bias, mean, var):
        return None
    made = kind(mean.shape[0], eps, momentum, weight is not None, device="meta")
    made.running_mean, made.running_var = mean, var
    made.num_batches_tracked = torch.tensor(0)
    return _filled(made, weight=weight, bias=bias)


def _layer_norm(
    _: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *__: Any
) -> nn.Module | None:
    if not _given(weight, bias):
        return None
    made = nn.LayerNorm(tuple(shape), eps, weight is not None, bias is not None, device="meta")
    return _filled(made, weight=weight, bias=bias)


def _rms_norm(_: Any, shape: Any, weight: Any = None, eps: float | None = None) -> nn.Module | None:
    if not _given(weight):
        return None
    made = nn.RMSNorm(tuple(shape), eps, weight is not None, device="meta")
    return _filled(made, weight=weight)


def _group_norm(
    _: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *__: Any
) -> nn.Module | None:
    if weight is None or bias is None or not _given(weight, bias):
        return None
    made = nn.GroupNorm(groups, weight.shape[0], eps, device="meta")
    return _filled(made, weight=weight, bias=bias)


def _embedding(weight: Any, _: Any, padding_idx: int = -1, *__: Any) -> nn.Module | None:
    if not isinstance(weight, torch.Tensor):
        return None
    padding = None if padding_idx < 0 else padding_idx
    made = nn.Embedding(weight.shape[0], weight.shape[1], padding, device="meta")
    return _filled(made, weight=weight)


def _prelu(_: Any, weight: Any) -> nn.Module | None:
    return (
        _filled(nn.PReLU(weight.numel(), device="meta"), weight=weight) if _given(weight) else None
    )


def _gelu(_: Any, approximate: str = "none") -> nn.Module:
    return nn.GELU(approximate)


def _softmax(_: Any, dim: int, dtype: Any = None) -> nn.Module | None:
    return nn.Softmax(dim) if dtype is None else None


def _hardtanh(_: Any, low: float = -1.0, high: float = 1.0) -> nn.Module:
    return nn.ReLU6() if (low, high) == (0.0, 6.0) else nn.Hardtanh(low, high)


def _max_pool(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    build = _pool(kind)
    # the module has ``return_indices`` before ``ceil_mode``
    return lambda x, *args: build(x, *args[:4], *((False, args[4]) if len(args) > 4 else ()))


def _pool(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    def build(_: Any, *args: Any) -> nn.Module:
        values = [_sizes(v) if isinstance(v, (list, tuple)) and v else v for v in args]
        if len(values) > 1 and values[1] == []:
            values[1] = None
        return kind(*values)

    return build


_BUILDERS: dict[Any, Callable[..., nn.Module | None]] = {
    _aten.linear.default: _linear,
    _aten.conv1d.default: _conv(nn.Conv1d),
    _aten.conv2d.default: _conv(nn.Conv2d),
    _aten.conv3d.default: _conv(nn.Conv3d),
    _aten.conv1d.padding: _conv(nn.Conv1d),
    _aten.conv2d.padding: _conv(nn.Conv2d),
    _aten.conv3d.padding: _conv(nn.Conv3d),
    _aten.conv_transpose1d.default: _conv_transposed(nn.ConvTranspose1d),
    _aten.conv_transpose2d.input: _conv_transposed(nn.ConvTranspose2d),
    _aten.conv_transpose3d.input: _conv_transposed(nn.ConvTranspose3d),
    _aten.batch_norm.default: _batch_norm,
    _aten.layer_norm.default: _layer_norm,
    _aten.group_norm.default: _group_norm,
    _aten.rms_norm.default: _rms_norm,
    _aten.embedding.default: _embedding,
    _aten.prelu.default: _prelu,
    _aten.gelu.default: _gelu,
    _aten.softmax.int: _softmax,
    _aten.hardtanh.default: _hardtanh,
    _aten.max_pool1d.default: _max_pool(nn.MaxPool1d),
    _aten.max_pool2d.default: _max_pool(nn.MaxPool2d),
    _aten.max_pool3d.default: _max_pool(nn.MaxPool3d),
    _aten.avg_pool1d.default: _pool(nn.AvgPool1d),
    _aten.avg_pool2d.default: _pool(nn.AvgPool2d),
    _aten.avg_pool3d.default: _pool(nn.AvgPool3d),
    _aten.adaptive_avg_pool1d.default: _pool(nn.AdaptiveAvgPool1d),
    _aten.adaptive_avg_pool2d.default: _pool(nn.AdaptiveAvgPool2d),
    _aten.adaptive_avg_pool3d.default: _pool(nn.AdaptiveAvgPool3d),
}
