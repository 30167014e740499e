"""Recurrent layers and cells, quantized dynamically: weights ahead, activations per call."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.nn.quantized import reference
from backquant.operators.entry import admit, swapped
from backquant.operators.operator import Operator, Sample

PAIRS: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (nn.GRUCell, reference.GRUCell),
    (nn.LSTMCell, reference.LSTMCell),
    (nn.RNNCell, reference.RNNCell),
    (nn.LSTM, reference.LSTM),
    (nn.GRU, reference.GRU),
)


def entries(
    dtype_configs: Sequence[DTypeConfig], kinds: Collection[type[nn.Module]] = ()
) -> list[BackendPatternConfig]:
    """Cells, then layers, each with its reference module; ``kinds``: these alone.

    >>> [e.pattern.__name__ for e in entries([DTypeConfig()])]
    ['GRUCell', 'LSTMCell', 'RNNCell', 'LSTM', 'GRU']
    """
    pairs = [(rnn, ref) for rnn, ref in PAIRS if rnn in kinds or not kinds]
    return admit([swapped(rnn, rnn, ref) for rnn, ref in pairs], dtype_configs)


_SAMPLES = {
    nn.GRUCell: Sample(((3, 8),), module_args=(8, 6)),
    nn.LSTMCell: Sample(((3, 8),), module_args=(8, 6)),
    nn.RNNCell: Sample(((3, 8),), module_args=(8, 6)),
    nn.LSTM: Sample(((5, 3, 8),), module_args=(8, 6)),
    nn.GRU: Sample(((5, 3, 8),), module_args=(8, 6)),
}

OPERATORS: tuple[Operator, ...] = tuple(
    Operator(
        name=rnn.__name__.lower().replace("cell", "_cell"),
        family="recurrent",
        sample=_SAMPLES[rnn],
        modules=(rnn,),
        weight_channel_axis=0,
        reference=ref,
        gives_state=rnn in (nn.LSTMCell, nn.LSTM, nn.GRU),
    )
    for rnn, ref in PAIRS
)
