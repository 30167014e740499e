"""A model with six operators that stay float, for five kinds of reasons and by the user's wish.

    PYTHONPATH=tests python -m report_examples.five_refusals report.html

prints what ``backquant.explain`` says of it, and writes the page.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import backquant as bq
from backquant.report.model import Report

__all__ = ["KINDS", "Gate", "Model", "custom", "inputs", "mapping", "report"]

#: Node, and why it stays float.
KINDS = {
    "wide": "dtype",  # the weight: int16 was asked for
    "skip": "qconfig-none",  # by the user's wish
    "gate": "not-traced",  # its branch depends on data
    "emb": "dtype",  # the activation: weight-only was not asked for
    "act": "no-entry",
    "sigmoid": "fixed-qparams",
    "narrow": "quant-range",
}


class Gate(nn.Module):
    """Cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.wide, self.skip = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.gate, self.emb = Gate(), nn.Embedding(10, 8)
        self.fc, self.act, self.narrow = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.gate(self.wide(x) + self.skip(x)).mean([2, 3])
        x = self.act(self.fc(x + self.emb(index)))
        return torch.sigmoid(self.narrow(x))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 8, 8), torch.tensor([1, 2])


def mapping() -> bq.QConfigMapping:
    activation = bq.MinMaxObserver.with_args(dtype=torch.quint8)
    signed = bq.MinMaxObserver.with_args(dtype=torch.qint8, eps=2**-12)
    wide = bq.MinMaxObserver.with_args(dtype=torch.int16)
    full = bq.MinMaxObserver.with_args(dtype=torch.qint8, quant_min=-128, eps=2**-12, quant_max=127)
    return (
        bq.get_default_qconfig_mapping("qnnpack")
        .set_module_name("wide", bq.QConfig(activation, wide))
        .set_module_name("skip", None)
        .set_module_name("narrow", bq.QConfig(signed, full))
        .set_object_type(torch.sigmoid, bq.QConfig(activation, bq.observe.default_weight_observer))
        .set_module_name("decodr.fc", None)  # misspelt
    )


def custom() -> bq.PrepareCustomConfig:
    return bq.PrepareCustomConfig().set_non_traceable_module_names(["gate"])


def report(asked: bq.QConfigMapping | None = None) -> Report:
    asked = mapping() if asked is None else asked
    config = bq.get_backend_config("qnnpack")
    assert config.defaults is not None
    config.set_defaults(replace(config.defaults, leave_float=()))  # what is asked, and no more
    return bq.explain(
        Model(), inputs(), backend=config, qconfig_mapping=asked, prepare_custom_config=custom()
    )


if __name__ == "__main__":
    found = report()
    print(found)
    if len(sys.argv) > 1:
        found.save_html(sys.argv[1])
