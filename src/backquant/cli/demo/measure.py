"""Latency of two models side by side, on one thread: the median of alternating runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Latency:
    """Median milliseconds a batch of two models, measured in turn, and their ratio."""

    batch: int
    float_ms: float
    quantized_ms: float

    @property
    def ratio(self) -> float:
        """How many times faster the quantized model is."""
        return self.float_ms / self.quantized_ms


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _milliseconds(model: nn.Module, batch: torch.Tensor, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        model(batch)
    return (time.perf_counter() - start) * 1e3 / repeats


def compare_latency(
    model: nn.Module, quantized: nn.Module, batch: torch.Tensor, rounds: int = 15
) -> Latency:
    """Both models on the same batch, alternating so that a drift of the machine hits both."""
    with torch.no_grad(), _one_thread():
        repeats = max(1, int(20 / max(_milliseconds(model, batch, 2), 1e-3)))
        _milliseconds(quantized, batch, 2)
        pairs = [
            (_milliseconds(model, batch, repeats), _milliseconds(quantized, batch, repeats))
            for _ in range(rounds)
        ]
    return Latency(
        batch=len(batch),
        float_ms=statistics.median(a for a, _ in pairs),
        quantized_ms=statistics.median(b for _, b in pairs),
    )
