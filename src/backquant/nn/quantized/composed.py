"""Quantized LSTM, LSTM cell and attention: the observed modules with their observers' results.

Every observer becomes a ``QuantizeDequantize``, every linear a reference linear with integer
weights. They compute in float on values that an integer engine would have.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.nn import quantizable
from backquant.nn.quantizable.slots import (
    Slot,
    SlotLinear,
    SlotQATLinear,
    SlotReferenceLinear,
    SlotSigmoid,
    SlotTanh,
)
from backquant.nn.quantized.quantize_dequantize import QuantizeDequantize
from backquant.observe import (
    default_fixed_qparams_range_0to1_observer,
    default_fixed_qparams_range_neg1to1_observer,
)
from backquant.observe.protocol import qparam_dict

_Module = TypeVar("_Module", bound="_Composed")
_TOKENS = (torch.quint8, torch.qint8, torch.qint32)


def _reference_linear(linear: nn.Module, qconfig: Any) -> SlotReferenceLinear:
    """The integer form: qparams from the weight's fake quantize, else a new observer's."""
    observer = copy.deepcopy(getattr(linear, "weight_fake_quant", None)) or qconfig.weight()
    weight = linear.get_parameter("weight").detach()
    observer.to(weight.device)(weight)
    return SlotReferenceLinear.from_float(linear, qparam_dict(observer))


def _fixed_observer(part: Slot) -> nn.Module | None:
    observer: nn.Module | None = None
    if isinstance(part, SlotTanh):
        observer = default_fixed_qparams_range_neg1to1_observer()
    elif isinstance(part, SlotSigmoid):
        observer = default_fixed_qparams_range_0to1_observer()
    return observer


def _quantize(module: nn.Module, name: str, part: Slot, qconfig: Any) -> None:
    slot: nn.Module | None = part.activation_post_process
    if isinstance(part, (SlotLinear, SlotQATLinear)):
        part = _reference_linear(part, qconfig)
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, part)
    if slot is None:  # the ranges that calibration need not measure
        slot = _fixed_observer(part)
    part.activation_post_process = None if slot is None else QuantizeDequantize.from_observer(slot)


class _Composed(nn.Module):
    """What the three classes share."""

    float_interface: ClassVar[bool] = True
    _OBSERVED: ClassVar[type[nn.Module]]

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"

    @classmethod
    def from_float(cls, other: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG003
        """Raises ``ConfigError``: quantization needs the measurements of an observed module."""
        name = cls.__name__
        raise ConfigError(
            f"quantized.{name} is made of an observed module, not of a float one",
            where=f"backquant.nn.quantized.{name}.from_float(module)",
            fix=f"observed = backquant.nn.quantizable.{name}.from_float(module)\n"
            "observed(calibration_batch)\n"
            f"backquant.nn.quantized.{name}.from_observed(observed)",
        )

    @classmethod
    def from_observed(cls: type[_Module], other: nn.Module) -> _Module:
        """The quantized form of the observed ``other``, which is left as it is, in eval mode.

        Raises ``ConfigError`` for anything but a module of the ``quantizable`` form that ``from_float`` made.
        """
        expected = cls._OBSERVED
        if type(other) is not expected or not getattr(other, "qconfig", None):
            raise ConfigError(
                f"quantized.{cls.__name__}.from_observed takes a quantizable.{expected.__name__} that "
                f"from_float made, got {type(other).__name__}",
                where=f"backquant.nn.quantized.{cls.__name__}.from_observed(module)",
                fix=f"backquant.nn.quantizable.{expected.__name__}.from_float(float_module), "
                "then calibrate",
            )
        twin = copy.deepcopy(other).eval()
        qconfig = twin.qconfig
        for name, part in list(twin.named_modules()):
            own = getattr(part, "qconfig", qconfig)
            if isinstance(part, Slot) and own is not None:
                _quantize(twin, name, part, own)
        del twin.qconfig
        quantized = cls.__new__(cls)  # its constructor would make float linears
        vars(quantized).update(vars(twin))
        return quantized


class LSTM(_Composed, quantizable.LSTM):
    """The quantized form of ``quantizable.LSTM``.

    >>> from types import SimpleNamespace
    >>> import torch
    >>> from backquant.observe import MinMaxObserver
    >>> lstm = nn.LSTM(3, 4)
    >>> lstm.qconfig = SimpleNamespace(
    ...     activation=MinMaxObserver, weight=MinMaxObserver.with_args(dtype=torch.qint8))
    >>> observed = quantizable.LSTM.from_float(lstm.eval())
    >>> x = torch.randn(5, 2, 3)
    >>> _ = observed(x)
    >>> quantized = LSTM.from_observed(observed)
    >>> quantized.layers[0].layer_fw.cell.igates.weight.dtype, quantized(x)[0].shape
    (torch.int8, torch.Size([5, 2, 4]))

    Given PyTorch's quantized tensors it gives those: with the scales of ``results``, one for the output and
    each state; where that is ``None``, a float tensor. By default they are those that the last layer has.
    """

    _OBSERVED = quantizable.LSTM
    results: tuple[QuantizeDequantize | None, ...] | None = None

    def forward(self, x: torch.Tensor, hidden: Any = None) -> Any:
        """Output and the two states, of the shapes of ``nn.LSTM``; floats, or quantized tensors."""
        if not isinstance(x, torch.Tensor) or not x.is_quantized:
            return super().forward(x, hidden)
        states = None if hidden is None else tuple(state.dequantize() for state in hidden)
        out, (hx, cx) = super().forward(x.dequantize(), states)
        results = self.own_results() if self.results is None else self.results
        out, hx, cx = (
            value if by is None else torch.quantize_per_tensor(by(value), *by.numbers)
            for value, by in zip((out, hx, cx), results, strict=True)
        )
        return out, (hx, cx)

    def own_results(self) -> tuple[QuantizeDequantize | None, ...]:
        """By what output, hidden and cell states are rounded already; ``None`` where there are several."""
        layer: Any = self.layers[-1]
        cell = layer.layer_fw.cell
        parts = [cell.ogate_cy, cell.ogate_cy, cell.fgate_cx_igate_cgate]
        found = [part.activation_post_process for part in parts]
        one = [not self.bidirectional, *[not self.bidirectional and self.num_layers == 1] * 2]
        return tuple(
            by if is_one and by is not None and by.dtype in _TOKENS else None
            for by, is_one in zip(found, one, strict=True)
        )


class LSTMCell(_Composed, quantizable.LSTMCell):
    """The quantized form of ``quantizable.LSTMCell``.

    >>> LSTMCell.from_float(nn.LSTMCell(1, 1))
    Traceback (most recent call last):
        ...
    backquant.errors.ConfigError: quantized.LSTMCell is made of an observed module, ...
    """

    _OBSERVED = quantizable.LSTMCell


class MultiheadAttention(_Composed, quantizable.MultiheadAttention):
    """The quantized form of ``quantizable.MultiheadAttention``.

    >>> MultiheadAttention.from_observed(nn.MultiheadAttention(2, 1))
    Traceback (most recent call last):
        ...
    backquant.errors.ConfigError: quantized.MultiheadAttention.from_observed takes a ...
    """

    _OBSERVED = quantizable.MultiheadAttention
