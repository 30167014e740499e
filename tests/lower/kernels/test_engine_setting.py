"""Packing for qnnpack and running keep out of each other's way."""

from __future__ import annotations

import threading

import pytest
import torch

from backquant.lower.kernels.engine_setting import packing_for, running

WAIT = 30.0


def engine() -> str:
    return str(torch.backends.quantized.engine)


def test_the_setting_is_put_back_after_an_error() -> None:
    before = engine()
    with pytest.raises(ValueError, match="no"), packing_for("qnnpack"):
        assert engine() == "qnnpack"
        raise ValueError("no")
    assert engine() == before


def test_qnnpack_rounds_hard_swish_otherwise() -> None:
    """Why running models are kept apart from packing; when it fails, torch's kernels agree."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 3
    x = torch.quantize_per_tensor(values, 0.03, 100, torch.quint8)
    plain = torch.ops.quantized.hardswish(x, 0.02, 5).int_repr()
    with packing_for("qnnpack"):
        other = torch.ops.quantized.hardswish(x, 0.02, 5).int_repr()
    assert not torch.equal(plain, other)


def test_packing_waits_for_what_runs_and_what_runs_waits_for_packing() -> None:
    order: list[str] = []
    packs = threading.Event()

    def pack() -> None:
        with packing_for("qnnpack"):
            order.append("packed")

    def run() -> None:
        with running():
            order.append("ran")

    with running():
        thread = threading.Thread(target=pack)
        thread.start()
        packs.wait(0.05)
        order.append("first")
    thread.join(WAIT)
    with packing_for("qnnpack"):
        thread = threading.Thread(target=run)
        thread.start()
        packs.wait(0.05)
        order.append("second")
    thread.join(WAIT)
    assert order == ["first", "packed", "second", "ran"]


def test_two_models_that_pack_while_they_run_do_not_wait_for_each_other() -> None:
    both = threading.Barrier(2)
    done: list[str] = []

    def call() -> None:
        with running(), running():
            both.wait(WAIT)
            with packing_for("qnnpack"):
                done.append(engine())

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert done == ["qnnpack"] * 2
    assert engine() != "qnnpack"
