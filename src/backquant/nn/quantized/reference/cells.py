"""The reference forms of recurrent cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from backquant.errors import ConfigError, InputError
from backquant.nn.quantized.reference.integer_weights import IntegerWeights
from backquant.nn.quantized.reference.module import float_bias, float_weight, take_bias
from backquant.nn.quantized.reference.recurrent import qparams_of

_Cell = TypeVar("_Cell", bound="_ReferenceCell")
_Pair = tuple[torch.Tensor, torch.Tensor]
_WEIGHTS, _BIASES = ("weight_ih", "weight_hh"), ("bias_ih", "bias_hh")


class _ReferenceCell(IntegerWeights, nn.RNNCellBase):
    """The arguments of the float cell, then ``weight_qparams_dict`` by keyword."""

    weight_names = _WEIGHTS

    def __init__(
        self, *args: Any, weight_qparams_dict: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        for name in self.weight_names:
            self._store(name, getattr(self, name), qparams_of(name, weight_qparams_dict))

    def get_weight_ih(self) -> torch.Tensor:
        """The dequantized input weight."""
        return self._dequantized("weight_ih")

    def get_weight_hh(self) -> torch.Tensor:
        """The dequantized hidden weight."""
        return self._dequantized("weight_hh")

    def get_quantized_weight_ih(self) -> torch.Tensor:
        """The integers of the input weight."""
        return self.weight_ih

    def get_quantized_weight_hh(self) -> torch.Tensor:
        """The integers of the hidden weight."""
        return self.weight_hh

    def _step(self, operator: Callable[..., Any], input: torch.Tensor, state: Any) -> Any:
        """One step of a batched input ``(N, input_size)``."""
        return operator(
            input, state, self.get_weight_ih(), self.get_weight_hh(), self.bias_ih, self.bias_hh
        )

    def _batch(self, input: torch.Tensor, state: torch.Tensor | None) -> _Pair:
        """Input and state with a batch dimension; a missing state is zero."""
        if input.dim() not in (1, 2):
            raise InputError(
                f"a recurrent cell takes inputs of 1 or 2 dimensions, got {input.dim()}",
                where=f"{type(self).__name__}.forward",
                fix=f"pass (N, {self.input_size}) or ({self.input_size},)",
            )
        batched = input if input.dim() == 2 else input.unsqueeze(0)
        if state is None:
            return batched, batched.new_zeros(batched.shape[0], self.hidden_size)
        return batched, state if input.dim() == 2 else state.unsqueeze(0)

    @classmethod
    def from_float(
        cls: type[_Cell],
        mod: nn.Module,
        weight_qparams_dict: Mapping[str, Any],
        use_precomputed_fake_quant: bool = False,  # noqa: ARG003
    ) -> _Cell:
        """Quantize the weights of ``mod``, which is left as it is and shares nothing.

        ``weight_qparams_dict`` maps ``weight_ih`` and ``weight_hh`` to their qparams; PyTorch's key
        ``is_decomposed`` is accepted and has no effect, nor has ``use_precomputed_fake_quant``.
        Raises ``ConfigError`` when one is missing or does not fit.
        """
        arguments = {name: getattr(mod, name) for name in cls.__constants__}
        reference = cls(**arguments, device="meta")
        for name in cls.weight_names:
            qparams = qparams_of(name, weight_qparams_dict)
            reference._store(name, float_weight(mod, name), qparams)
        for name in _BIASES:
            take_bias(reference, float_bias(mod, name), name)
        reference.train(mod.training)
        return reference


class RNNCell(_ReferenceCell, nn.RNNCell):
    """``torch.nn.RNNCell`` on integer weights; its arguments, then ``weight_qparams_dict=``.

    >>> RNNCell(3, 4)(torch.zeros(2, 3)).shape
    torch.Size([2, 4])
    """

    def forward(self, input: torch.Tensor, hx: torch.Tensor | None = None) -> torch.Tensor:
        """``(N, input_size)`` and ``(N, hidden_size)`` to ``(N, hidden_size)``; N may be absent."""
        operators = {"tanh": torch.rnn_tanh_cell, "relu": torch.rnn_relu_cell}
        if self.nonlinearity not in operators:
            raise ConfigError(
                f"RNNCell has no nonlinearity {self.nonlinearity!r}",
                where="RNNCell.nonlinearity",
                fix="nonlinearity='tanh'  # or 'relu'",
            )
        batched, state = self._batch(input, hx)
        output: torch.Tensor = self._step(operators[self.nonlinearity], batched, state)
        return output if input.dim() == 2 else output.squeeze(0)


class GRUCell(_ReferenceCell, nn.GRUCell):
    """``torch.nn.GRUCell`` on integer weights; its arguments, then ``weight_qparams_dict=``.

    >>> GRUCell(3, 4)(torch.zeros(3)).shape
    torch.Size([4])
    """

    def forward(self, input: torch.Tensor, hx: torch.Tensor | None = None) -> torch.Tensor:
        """``(N, input_size)`` and ``(N, hidden_size)`` to ``(N, hidden_size)``; N may be absent."""
        batched, state = self._batch(input, hx)
        output: torch.Tensor = self._step(torch.gru_cell, batched, state)
        return output if input.dim() == 2 else output.squeeze(0)


class LSTMCell(_ReferenceCell, nn.LSTMCell):
    """``torch.nn.LSTMCell`` on integer weights; its arguments, then ``weight_qparams_dict=``.

    >>> hidden, cell = LSTMCell(3, 4)(torch.zeros(2, 3))
    >>> hidden.shape, cell.shape
    (torch.Size([2, 4]), torch.Size([2, 4]))
    """

    def forward(self, input: torch.Tensor, hx: _Pair | None = None) -> _Pair:
        """``(N, input_size)`` and two ``(N, hidden_size)`` to two ``(N, hidden_size)``."""
        hidden, cell = (None, None) if hx is None else hx
        batched, hidden = self._batch(input, hidden)
        _, cell = self._batch(input, cell)
        new_hidden, new_cell = self._step(torch.lstm_cell, batched, (hidden, cell))
        if input.dim() == 2:
            return new_hidden, new_cell
        return new_hidden.squeeze(0), new_cell.squeeze(0)
