"""Recommenders (torchfm), networks on tables (rtdl) and PyTorch's own recurrent and transformer modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.stock.entry import Entry

__all__ = ["entries"]

FIELDS = (100, 60, 40, 30, 20, 12, 8, 4)
WIDTH = 16


def choices(batch: int = 4) -> torch.Tensor:
    """One value of each field."""
    return torch.stack([torch.randint(0, size, (batch,)) for size in FIELDS], 1)


def rows(batch: int = 4, width: int = 16) -> torch.Tensor:
    return torch.randn(batch, width)


def sequences(batch: int = 2, length: int = 12, width: int = 32) -> torch.Tensor:
    return torch.randn(batch, length, width)


def mixed(batch: int = 4) -> dict[str, torch.Tensor]:
    return {"x_cont": rows(batch, 6), "x_cat": torch.randint(0, 4, (batch, 3))}


def factorization(name: str, *arguments: Any, **options: Any) -> nn.Module:
    from torchfm import model

    module, kind = name.split(".")
    from importlib import import_module

    made: nn.Module = getattr(import_module(f"{model.__name__}.{module}"), kind)(
        FIELDS, *arguments, **options
    )
    return made


def tabular(kind: str, **options: Any) -> nn.Module:
    import rtdl_revisiting_models

    model: nn.Module = getattr(rtdl_revisiting_models, kind)(**options)
    return model


def entries() -> Iterator[Entry]:
    yield from _recommenders()
    yield from _tables()
    yield from _recurrent()


def _recommenders() -> Iterator[Entry]:
    mlp = {"mlp_dims": (64, 32), "dropout": 0.1}
    several: dict[str, Any] = {
        "wd.WideAndDeepModel": ((WIDTH,), mlp),
        "dfm.DeepFactorizationMachineModel": ((WIDTH,), mlp),
        "xdfm.ExtremeDeepFactorizationMachineModel": (
            (WIDTH,),
            mlp | {"cross_layer_sizes": (16, 16), "split_half": False},
        ),
        "dcn.DeepCrossNetworkModel": ((WIDTH, 2), mlp),
        "nfm.NeuralFactorizationMachineModel": ((WIDTH, (64, 32)), {"dropouts": (0.1, 0.1)}),
        "afi.AutomaticFeatureInteractionModel": (
            (WIDTH, 32, 2, 2, (64, 32)),
            {"dropouts": (0.1, 0.1, 0.1)},
        ),
        "pnn.ProductNeuralNetworkModel": ((WIDTH, (64, 32), 0.1), {"method": "inner"}),
    }
    for name, (arguments, options) in several.items():
        make = partial(factorization, name, *arguments, **options)
        yield Entry(f"torchfm.{name.split('.')[1]}", "recommender", make, choices, ((3,), (1,)))


def _tables() -> Iterator[Entry]:
    ft = {"n_cont_features": 6, "cat_cardinalities": [4, 4, 4], "d_out": 2, "n_blocks": 2}
    ft |= {"d_block": 32, "attention_n_heads": 4, "attention_dropout": 0.2}
    ft |= {"ffn_d_hidden_multiplier": 2, "ffn_dropout": 0.1, "residual_dropout": 0.0}
    make = partial(tabular, "FTTransformer", **ft)
    yield Entry("rtdl.FTTransformer", "recommender", make, mixed, ((3,),))
    net = {"d_in": 16, "d_out": 2, "n_blocks": 2, "d_block": 64, "d_hidden": None}
    net |= {"d_hidden_multiplier": 2.0, "dropout1": 0.1, "dropout2": 0.0}
    yield Entry("rtdl.ResNet", "recommender", partial(tabular, "ResNet", **net), rows, ((3,),))


def _recurrent() -> Iterator[Entry]:
    kind, sizes = "recurrent", {"hidden_size": 64, "num_layers": 2, "batch_first": True}
    both = {**sizes, "bidirectional": True}
    other = ((3, 7), (1, 12))
    yield Entry("torch.nn.LSTM", kind, partial(nn.LSTM, 32, **sizes), sequences, other)
    yield Entry("torch.nn.GRU", kind, partial(nn.GRU, 32, **sizes), sequences, other)
    yield Entry("torch.nn.LSTM bidirectional", kind, partial(nn.LSTM, 32, **both), sequences, other)
    yield Entry("torch.nn.LSTMCell", kind, partial(nn.LSTMCell, 16, 32), rows, ((3,),))
    yield Entry("torch.nn.GRUCell", kind, partial(nn.GRUCell, 16, 32), rows, ((3,),))
    yield Entry("torch.nn.RNN", kind, partial(nn.RNN, 32, 64, batch_first=True), sequences, other)
    layer = partial(nn.TransformerEncoderLayer, 32, 4, 64, batch_first=True)
    make = lambda: nn.TransformerEncoder(layer(), 2)  # noqa: E731
    yield Entry("torch.nn.TransformerEncoder", "encoder", make, sequences, other)
    attention = partial(nn.MultiheadAttention, 32, 4, batch_first=True)
    three = lambda batch=2, length=12: (sequences(batch, length),) * 3  # noqa: E731
    yield Entry("torch.nn.MultiheadAttention", "encoder", attention, three, other)
    sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 64}
    pairs = lambda batch=2, length=9: (sequences(batch), sequences(batch, length))  # noqa: E731
    make = partial(nn.Transformer, 32, 4, batch_first=True, **sizes)
    yield Entry("torch.nn.Transformer", "encoder-decoder", make, pairs, ((3, 7),))
