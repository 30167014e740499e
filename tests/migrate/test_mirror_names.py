"""Names of the mirror, and what is left out of it."""

from __future__ import annotations

import importlib

import torch.ao.quantization as tq

from backquant.ao.left_out import GROUPS
from backquant.migrate.source import HOLDING, canonical, left_to_person, mirrored


def test_every_public_name_of_pytorch_is_mirrored_or_left_to_a_person() -> None:
    module = importlib.import_module("backquant.ao.quantization")
    for name in tq.__all__:
        if hasattr(tq, name):
            path = f"torch.quantization.{name}"
            assert mirrored(path) == f"backquant.ao.quantization.{name}"
            left = type(getattr(module, name)).__name__ == "_LeftOut"
            assert (left_to_person(path) is not None) is left


def test_older_packages() -> None:
    assert canonical("torch.nn.intrinsic.qat.ConvBn2d") == "torch.ao.nn.intrinsic.qat.ConvBn2d"
    assert canonical("torch.nn.Linear") == "torch.nn.Linear"
    assert mirrored("torch.quantizations") is None


def test_flows_whose_files_stay() -> None:
    assert {group.kind for group in HOLDING} == {
        "inside of the flow", "TorchScript", "PT2E",
    }  # fmt: skip
    assert left_to_person("torch.ao.quantization.quantize_pt2e.prepare_pt2e") == GROUPS["pt2e"]
