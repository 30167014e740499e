"""The reference forms of ``torch.nn.LSTM`` and ``torch.nn.GRU``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.nn.quantized.reference.integer_weights import IntegerWeights
from backquant.nn.quantized.reference.module import float_bias, float_weight, take_bias

_RNN = TypeVar("_RNN", bound="_ReferenceRNN")
_ARGUMENTS = (
    "input_size",
    "hidden_size",
    "num_layers",
    "bias",
    "batch_first",
    "dropout",
    "bidirectional",
)


def qparams_of(
    name: str, weight_qparams_dict: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The qparams of the weight ``name``; ``None`` without a dict; ``ConfigError`` when missing.

    >>> qparams_of("weight_ih", {"weight_ih": {"dtype": torch.float16}, "is_decomposed": False})
    {'dtype': torch.float16}
    """
    if weight_qparams_dict is None:
        return None
    if name not in weight_qparams_dict:
        raise ConfigError(
            f"no qparams for {name!r}",
            where=f"weight_qparams_dict with keys {sorted(weight_qparams_dict)}",
            fix=f"weight_qparams_dict[{name!r}] = {{'qscheme': ..., 'dtype': ..., 'scale': ..., "
            "'zero_point': ...}",
        )
    found: Mapping[str, Any] = weight_qparams_dict[name]
    return found


class _ReferenceRNN(IntegerWeights, nn.RNNBase):
    """The forward is the float module's own; it reads its weights from ``_flat_weights``."""

    def __init__(
        self, *args: Any, weight_qparams_dict: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        names = (name for name in self._flat_weights_names if name.startswith("weight"))
        self.weight_names = tuple(names)
        for name in self.weight_names:
            self._store(name, getattr(self, name), qparams_of(name, weight_qparams_dict))

    @property
    def _flat_weights(self) -> list[torch.Tensor | None]:
        """Dequantized weights and float biases, in the order of the float module."""
        if "weight_names" not in vars(self):  # nn.RNNBase's constructor asks before they exist
            return [self._parameters.get(name) for name in self._flat_weights_names]
        return self.get_flat_weights()

    @_flat_weights.setter
    def _flat_weights(self, value: object) -> None:
        """nn.RNNBase stores a list here; it is computed instead."""

    def _update_flat_weights(self) -> None:
        """Nothing to update: the list is computed."""

    def flatten_parameters(self) -> None:
        """Nothing to flatten: the float weights exist only during the forward."""

    def get_flat_weights(self) -> list[torch.Tensor | None]:
        """Dequantized weights and float biases, in the order of the float module."""
        return [
            self._dequantized(name) if name in self.weight_names else getattr(self, name, None)
            for name in self._flat_weights_names
        ]

    def get_quantized_weight_bias_dict(self) -> dict[str, torch.Tensor | None]:
        """Integer weights and float biases by name."""
        return {name: getattr(self, name, None) for name in self._flat_weights_names}

    @classmethod
    def from_float(cls: type[_RNN], mod: nn.Module, weight_qparams_dict: Mapping[str, Any]) -> _RNN:
        """Quantize the weights of ``mod``, which is left as it is and shares nothing.

        ``weight_qparams_dict`` maps the name of every weight (``weight_ih_l0``, …) to its qparams;
        PyTorch's key ``is_decomposed`` is accepted and has no effect. Raises ``ConfigError`` when
        one is missing or does not fit.
        """
        arguments = {name: getattr(mod, name) for name in _ARGUMENTS}
        if getattr(mod, "proj_size", 0):
            arguments["proj_size"] = mod.proj_size  # PyTorch's from_float drops it
        reference = cls(**arguments, device="meta")
        for name in reference._flat_weights_names:
            if name in reference.weight_names:
                qparams = qparams_of(name, weight_qparams_dict)
                reference._store(name, float_weight(mod, name), qparams)
            else:
                take_bias(reference, float_bias(mod, name), name)
        reference.train(mod.training)
        return reference


class LSTM(_ReferenceRNN, nn.LSTM):
    """``torch.nn.LSTM`` on integer weights; its arguments, then ``weight_qparams_dict=``.

    >>> qparams = {"qscheme": torch.per_tensor_affine, "dtype": torch.qint8, "scale": 0.01,
    ...            "zero_point": 0}
    >>> float_lstm = nn.LSTM(3, 4)
    >>> lstm = LSTM.from_float(float_lstm, {"weight_ih_l0": qparams, "weight_hh_l0": qparams})
    >>> lstm.weight_hh_l0.dtype, lstm(torch.zeros(5, 1, 3))[0].shape
    (torch.int8, torch.Size([5, 1, 4]))
    """


class GRU(_ReferenceRNN, nn.GRU):
    """``torch.nn.GRU`` on integer weights; its arguments, then ``weight_qparams_dict=``.

    >>> GRU(3, 4, bidirectional=True)(torch.zeros(5, 1, 3))[0].shape
    torch.Size([5, 1, 8])
    """
