"""Recurrent layers and cells with integer or float16 weights, by torch's quantized kernels.

Inputs and hidden states are quantized at each step. Without biases the kernels get zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from backquant.errors import InputError
from backquant.lower.kernels.repacked import RepackedKernel, pack_linear

_PARTS = ("", "_scale", "_zero_point")
State = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class RecurrentConfig:
    """``kind``: ``lstm`` or ``gru``. ``engine``: a quantized engine of torch. ``weight_dtype``: int8 or
    float16. ``reduce_range``: quantize activations to 7 bits."""

    kind: str
    engine: str
    weight_dtype: torch.dtype
    hidden_size: int
    num_layers: int = 1
    batch_first: bool = False
    bidirectional: bool = False
    reduce_range: bool = False

    @property
    def rows(self) -> int:
        """Layers times directions: the first dimension of the hidden state."""
        return self.num_layers * (2 if self.bidirectional else 1)


@dataclass(frozen=True)
class CellConfig:
    """``kind``: ``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``; the rest as in ``RecurrentConfig``."""

    kind: str
    engine: str
    weight_dtype: torch.dtype
    hidden_size: int


def recurrent_suffixes(num_layers: int, bidirectional: bool) -> Iterator[str]:
    """The ends of the weights' names in ``torch.nn.LSTM``, in its order.

    >>> list(recurrent_suffixes(1, True))
    ['_l0', '_l0_reverse']
    """
    for layer in range(num_layers):
        yield f"_l{layer}"
        if bidirectional:
            yield f"_l{layer}_reverse"


def _names(suffix: str) -> Iterator[str]:
    for side in ("ih", "hh"):
        yield from (f"weight_{side}{suffix}{part}" for part in _PARTS)
        yield f"bias_{side}{suffix}"


class _TwoWeights(RepackedKernel):
    """Packs the input's and the hidden state's weight of a layer or cell."""

    def _pair(self, suffix: str) -> tuple[list[Any], list[torch.Tensor]]:
        """Packed weights and biases of input and hidden state."""
        packed, biases = [], []
        for side in ("ih", "hh"):
            parts = [self._buffers[f"weight_{side}{suffix}{part}"] for part in _PARTS]
            weight, scale, zero_point = parts
            assert weight is not None and scale is not None and zero_point is not None
            bias = self._buffers[f"bias_{side}{suffix}"]
            bias = torch.zeros(weight.shape[0]) if bias is None else bias
            packed.append(pack_linear(self.config.engine, weight, scale, zero_point, bias))
            biases.append(bias)
        return packed, biases

    def check_features(self, x: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Raise ``InputError`` where qnnpack, which does not check the shape, would read past the end of
        ``weight``."""
        assert weight is not None
        if x.dtype != torch.float32 or not x.dim() or x.shape[-1] != weight.shape[1]:
            raise InputError(
                f"{self.name} takes float32 […, {weight.shape[1]}]",
                where=f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}",
                fix="inputs of the dtype and shape that the float model takes",
            )

    def states(self, x: torch.Tensor, shape: tuple[int, ...], hx: State) -> list[torch.Tensor]:
        """The hidden state: one tensor of ``shape``, of an LSTM two; zeros for ``None``."""
        wanted = 2 if self.config.kind == "lstm" else 1
        if hx is None:
            return [x.new_zeros(shape)] * wanted
        states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
        shapes = [tuple(state.shape) for state in states]
        if shapes != [shape] * wanted:
            raise InputError(
                f"the hidden state has the shapes {shapes}, expected {[shape] * wanted}",
                where=self.name,
                fix="pass the state that the float model takes",
            )
        return states

    def _reduces_range(self) -> bool:
        raise NotImplementedError

    def _label(self, operator: str) -> str:
        c = self.config
        what = [c.engine]
        if c.weight_dtype == torch.float16:
            what.append("float16")
        elif self._reduces_range():
            what.append("7 bits")
        return f"{operator}({', '.join(what)})"


class QuantizedRecurrent(_TwoWeights):
    """``aten::quantized_lstm`` and ``aten::quantized_gru``, called like ``nn.LSTM`` and ``nn.GRU``.

    Buffers: those of the float module's names, weights int8 (or float16) with ``_scale`` and
    ``_zero_point`` beside them.

    >>> config = RecurrentConfig("gru", "fbgemm", torch.float16, hidden_size=1)
    >>> tensors = {name: torch.ones(3, 1, dtype=torch.float16) for name in ("weight_ih_l0", "weight_hh_l0")}
    >>> tensors |= {f"{name}_scale": torch.ones(1) for name in tensors}
    >>> tensors |= {f"weight_{side}_l0_zero_point": torch.zeros(1) for side in ("ih", "hh")}
    >>> output, hidden = QuantizedRecurrent(config, tensors)(torch.zeros(5, 2, 1))
    >>> output.shape, hidden.shape
    (torch.Size([5, 2, 1]), torch.Size([1, 2, 1]))
    """

    config_class = RecurrentConfig
    config: RecurrentConfig

    def _reduces_range(self) -> bool:
        return self.config.reduce_range

    @property
    def name(self) -> str:
        return self._label(f"aten.quantized_{self.config.kind}")

    @classmethod
    def buffer_names(cls, config: RecurrentConfig) -> Iterable[str]:
        suffixes = recurrent_suffixes(config.num_layers, config.bidirectional)
        return [name for suffix in suffixes for name in _names(suffix)]

    def _pack(self) -> list[Any]:
        ops, c = torch.ops.quantized, self.config
        cells = []
        for suffix in recurrent_suffixes(c.num_layers, c.bidirectional):
            packed, biases = self._pair(suffix)
            if c.weight_dtype == torch.float16:
                cells.append(ops.make_quantized_cell_params_fp16(*packed))
            else:
                make = ops.make_quantized_cell_params_dynamic
                cells.append(make(*packed, *biases, c.reduce_range))
        return cells

    def forward(self, x: Any, hx: State = None) -> tuple[Any, State]:
        """``(T, N, in)`` (``(N, T, in)`` with ``batch_first``, ``(T, in)`` for one sequence), or a
        ``PackedSequence``, and a state to the outputs and the last state, of the kinds and shapes of
        ``nn.LSTM`` and ``nn.GRU``.

        Raises ``InputError`` for shapes that do not fit.
        """
        self.check_features(
            x.data if isinstance(x, PackedSequence) else x, self._buffers["weight_ih_l0"]
        )
        if isinstance(x, PackedSequence):
            return self._run_packed(x, hx)
        if x.dim() == 3:
            states = self._states(x, x.shape[0 if self.config.batch_first else 1], hx)
            return self._run((x,), states, self.config.batch_first)
        if x.dim() != 2:
            raise InputError(
                f"a recurrent layer takes inputs of 2 or 3 dimensions, got {x.dim()}",
                where=self.name,
                fix="pass (steps, batch, features), or (steps, features) for one sequence",
            )
        dim = 0 if self.config.batch_first else 1
        states = self._states(x, 1, _each(hx, lambda h: h.unsqueeze(1)))
        out, state = self._run((x.unsqueeze(dim),), states, self.config.batch_first)
        return out.squeeze(dim), _each(state, lambda h: h.squeeze(1))

    def _run_packed(self, x: PackedSequence, hx: State) -> tuple[PackedSequence, State]:
        """The batch is ordered by length inside of ``x``, and the states are not."""
        if x.sorted_indices is not None:
            order, back = x.sorted_indices, x.unsorted_indices
            hx = _each(hx, lambda h: h.index_select(1, order))
        states = self._states(x.data, int(x.batch_sizes[0]), hx)
        out, state = self._run((x.data, x.batch_sizes), states)
        if x.sorted_indices is not None:
            state = _each(state, lambda h: h.index_select(1, back))
        return PackedSequence(out, x.batch_sizes, x.sorted_indices, x.unsorted_indices), state

    def _states(self, x: torch.Tensor, batch: int, hx: State) -> list[torch.Tensor]:
        return self.states(x, (self.config.rows, batch, self.config.hidden_size), hx)

    def _run(
        self, x: tuple[torch.Tensor, ...], states: list[torch.Tensor], *batch_first: bool
    ) -> tuple[torch.Tensor, State]:
        """``x``: a batch of sequences, or the values and batch sizes of a packed one."""
        c = self.config
        fixed = (self.packed, True, c.num_layers, 0.0, False, c.bidirectional, *batch_first)
        if c.kind == "gru":
            out, state = torch.quantized_gru(*x, states[0], *fixed)
            return out, state
        dtype = torch.float16 if c.weight_dtype == torch.float16 else torch.qint8
        out, hidden, cell = torch.quantized_lstm(*x, states, *fixed, dtype=dtype, use_dynamic=True)
        return out, (hidden, cell)


def _each(state: State, change: Any) -> State:
    if state is None or isinstance(state, torch.Tensor):
        return None if state is None else change(state)
    first, second = state
    return change(first), change(second)


class QuantizedCell(_TwoWeights):
    """``quantized::quantized_{lstm,gru,rnn_tanh,rnn_relu}_cell_dynamic``, called like the float cells.

    >>> config = CellConfig("rnn_relu", "fbgemm", torch.float16, hidden_size=1)
    >>> tensors = {name: torch.ones(1, 1, dtype=torch.float16) for name in ("weight_ih", "weight_hh")}
    >>> tensors |= {f"{name}_scale": torch.ones(1) for name in tensors}
    >>> tensors |= {f"weight_{side}_zero_point": torch.zeros(1) for side in ("ih", "hh")}
    >>> QuantizedCell(config, tensors)(torch.tensor([[2.0]]), torch.tensor([[1.0]]))
    tensor([[3.]])
    """

    config_class = CellConfig
    config: CellConfig

    def _reduces_range(self) -> bool:
        return (
            self.config.engine != "qnnpack"
        )  # torch's operators always reduce the range, except that qnnpack ignores it

    @property
    def name(self) -> str:
        return self._label(f"quantized.quantized_{self.config.kind}_cell_dynamic")

    @classmethod
    def buffer_names(cls, config: CellConfig) -> Iterable[str]:  # noqa: ARG003
        return list(_names(""))

    def _pack(self) -> list[Any]:
        packed, biases = self._pair("")
        return [*packed, *biases]

    def forward(self, x: torch.Tensor, hx: State = None) -> Any:
        """``(N, in)`` (or ``(in,)``) and a state to the next state: a tensor, or two of an LSTM.

        Raises ``InputError`` for shapes that do not fit.
        """
        self.check_features(x, self._buffers["weight_ih"])
        if x.dim() not in (1, 2):
            raise InputError(
                f"a recurrent cell takes inputs of 1 or 2 dimensions, got {x.dim()}",
                where=self.name,
                fix="pass (batch, features) or (features,)",
            )
        if x.dim() == 2:
            return self._step(x, hx)
        result = self._step(x.unsqueeze(0), _each(hx, lambda h: h.unsqueeze(0)))
        return _each(result, lambda h: h.squeeze(0))

    def _step(self, x: torch.Tensor, hx: State) -> Any:
        c = self.config
        states = self.states(x, (x.shape[0], c.hidden_size), hx)
        operator = getattr(torch.ops.quantized, f"quantized_{c.kind}_cell_dynamic")
        return operator(x, states if c.kind == "lstm" else states[0], *self.packed)
