"""An LSTM cell rebuilt from parts that observers reach."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.nn.quantizable.observing import observe, require_qconfig
from backquant.nn.quantizable.slots import FloatFunctional, SlotLinear, SlotSigmoid, SlotTanh

_GATES = ("input", "forget", "cell", "output")
State = tuple[torch.Tensor, torch.Tensor]


class LSTMCell(nn.Module):
    """``nn.LSTMCell`` of linears, sigmoids, tanhs and elementwise functions.

    Input ``(N, input_dim)``, states ``(N, hidden_dim)``; N may be absent. ``split_gates`` computes
    each gate by linears of its own instead of cutting one wide result in four.

    >>> cell = LSTMCell(3, 4)
    >>> hidden, state = cell(torch.zeros(2, 3))
    >>> hidden.shape, sorted(name.split(".")[0] for name in cell.state_dict())[:2]
    (torch.Size([2, 4]), ['hgates', 'hgates'])
    """

    _FLOAT_MODULE = nn.LSTMCell

    def __init__(
        self,
        input_dim: int,
        hidden_dim: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        split_gates: bool = False,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_dim, hidden_dim
        self.bias, self.split_gates = bias, split_gates
        self.igates = self._linears(input_dim, device, dtype)
        self.hgates = self._linears(hidden_dim, device, dtype)
        functions = {gate: FloatFunctional() for gate in _GATES}
        self.gates = nn.ModuleDict(functions) if split_gates else FloatFunctional()
        self.input_gate, self.forget_gate = SlotSigmoid(), SlotSigmoid()
        self.cell_gate, self.output_gate = SlotTanh(), SlotSigmoid()
        self.fgate_cx, self.igate_cgate = FloatFunctional(), FloatFunctional()
        self.fgate_cx_igate_cgate = FloatFunctional()
        self.cell_tanh = SlotTanh()
        self.ogate_cy = FloatFunctional()

    def _linears(self, size: int, device: Any, dtype: torch.dtype | None) -> nn.Module:
        def linear(rows: int) -> SlotLinear:
            return SlotLinear(size, rows, self.bias, device=device, dtype=dtype)

        if not self.split_gates:
            return linear(4 * self.hidden_size)
        return nn.ModuleDict({gate: linear(self.hidden_size) for gate in _GATES})

    def _gate_sums(self, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What enters the gates' nonlinearities: input, forget, cell, output."""
        if isinstance(self.gates, FloatFunctional):
            return self.gates.add(self.igates(x), self.hgates(hidden)).chunk(4, -1)
        parts = (self.gates, self.igates, self.hgates)
        sums = []
        for gate in _GATES:
            function, igate, hgate = (part.get_submodule(gate) for part in parts)
            assert isinstance(function, FloatFunctional)
            sums.append(function.add(igate(x), hgate(hidden)))
        return tuple(sums)

    def forward(self, x: torch.Tensor, hidden: State | None = None) -> State:
        """The new hidden and cell states; missing ones start as zeros."""
        if hidden is None or hidden[0] is None or hidden[1] is None:
            zeros = x.new_zeros(*x.shape[:-1], self.hidden_size)
            hidden = (zeros, zeros)
        hx, cx = hidden
        inputs, forget, cell, output = self._gate_sums(x, hx)
        kept = self.fgate_cx.mul(self.forget_gate(forget), cx)
        added = self.igate_cgate.mul(self.input_gate(inputs), self.cell_gate(cell))
        cy = self.fgate_cx_igate_cgate.add(kept, added)
        hy = self.ogate_cy.mul(self.output_gate(output), self.cell_tanh(cy))
        return hy, cy

    def _get_name(self) -> str:
        return "QuantizableLSTMCell"

    @classmethod
    def from_params(
        cls,
        wi: torch.Tensor,
        wh: torch.Tensor,
        bi: torch.Tensor | None = None,
        bh: torch.Tensor | None = None,
        split_gates: bool = False,
    ) -> LSTMCell:
        """A cell with the weights and biases of ``nn.LSTMCell``: ``(4 * hidden, …)``, or ``None``.

        The tensors are shared; splitting the gates makes copies.
        """
        if (bi is None) != (bh is None):
            raise ConfigError(
                "an LSTM cell has two biases or none",
                where="quantizable.LSTMCell.from_params(wi, wh, bi, bh)",
                fix="pass both bi and bh, or neither",
            )
        size, hidden = wi.shape[1], wh.shape[1]
        cell = cls(size, hidden, bi is not None, device="meta", split_gates=split_gates)
        for gates, weight, bias in ((cell.igates, wi, bi), (cell.hgates, wh, bh)):
            if isinstance(gates, SlotLinear):
                _give(gates, weight, bias)
                continue
            biases = [None] * 4 if bias is None else bias.chunk(4)
            for gate, w, b in zip(gates.children(), weight.chunk(4), biases, strict=True):
                _give(gate, w.clone(), None if b is None else b.clone())
        return cell

    @classmethod
    def from_float(
        cls,
        other: nn.Module,
        use_precomputed_fake_quant: bool = False,  # noqa: ARG003
        split_gates: bool = False,
    ) -> LSTMCell:
        """The observed form of an ``nn.LSTMCell`` with a ``qconfig``, in its mode.

        In training mode it is fake-quantized. Raises ``ConfigError`` for another type or without
        ``qconfig``. PyTorch's leaves the insertion of observers to eager-mode ``prepare``.
        """
        float_cell = require_float(cls, other, cls._FLOAT_MODULE)
        qconfig = require_qconfig(other, "quantizable.LSTMCell")
        cell = cls.from_params(
            float_cell.weight_ih,
            float_cell.weight_hh,
            float_cell.bias_ih if float_cell.bias else None,
            float_cell.bias_hh if float_cell.bias else None,
            split_gates,
        )
        cell.qconfig = qconfig
        cell.train(other.training)
        observe(cell, qconfig)
        return cell


def _give(linear: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    def parameter(tensor: torch.Tensor) -> nn.Parameter:
        if isinstance(tensor, nn.Parameter):
            return tensor
        return nn.Parameter(tensor.detach(), tensor.requires_grad)

    linear.register_parameter("weight", parameter(weight))
    linear.register_parameter("bias", None if bias is None else parameter(bias))


def require_float(cls: type[nn.Module], module: nn.Module, expected: type[nn.Module]) -> Any:
    """``module`` if it is exactly an ``expected``; else ``ConfigError``.

    >>> require_float(LSTMCell, nn.LSTMCell(1, 1), nn.LSTMCell)
    LSTMCell(1, 1)
    """
    if type(module) is expected:
        return module
    raise ConfigError(
        f"quantizable.{cls.__name__}.from_float takes a torch.nn.{expected.__name__}, "
        f"got {type(module).__name__}",
        where=f"backquant.nn.quantizable.{cls.__name__}.from_float(module)",
        fix=f"pass the torch.nn.{expected.__name__} itself",
    )
