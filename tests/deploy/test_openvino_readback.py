"""Products are told apart from what OpenVINO puts around them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backquant
from backquant.deploy.openvino.session import Origins, _attention_on_integers


def exported(model: nn.Module, x: Any, path: Path, mapping: Any = None) -> backquant.Exported:
    more = {} if mapping is None else {"qconfig_mapping": mapping}
    made = backquant.quantize(
        model.eval(), x, backend="openvino", calibration=[x], slower="keep", **more
    )
    return backquant.export(made, path / "m.xml", example_inputs=x, require=0.0)


class Alike(nn.Module):
    """As CLIP: the product is a result, and so is what it becomes turned around."""

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        logits = (2.5 * image) @ text.t()
        return logits, logits.t()


def test_a_product_that_is_a_result(tmp_path: Path) -> None:
    found = exported(Alike(), (torch.randn(3, 32), torch.randn(3, 32)), tmp_path)
    assert found.integer_share == 1.0
    assert [use.dtype for use in found.kernels if use.kernel == "MatMul"] == ["i8"]


class Layer:
    """A layer of a compiled model, with the layers it reads."""

    def __init__(self, names: str, precision: str, *sources: Layer) -> None:
        self.info = {"originalLayersNames": names, "outputPrecisions": precision}
        self.sources = sources

    def get_rt_info(self) -> dict[str, Any]:
        return {
            key: SimpleNamespace(astype=lambda _, value=value: value)
            for key, value in self.info.items()
        }

    def get_input_size(self) -> int:
        return len(self.sources)

    def input_value(self, position: int) -> Any:
        return SimpleNamespace(get_node=lambda: self.sources[position])


NAMES = {f"{name}/Op": name for name in ("query", "round", "back", "scores", "softmax", "mixed")}
AFTER = {
    "query": "scores",
    "scores": "softmax",
    "softmax": "mixed",
    "round": "back",
    "back": "mixed",
}


@pytest.mark.parametrize(
    ("query", "value", "wanted"),
    [("bf16", "i8", {"mixed"}), ("bf16", "bf16", set()), ("i8", "bf16", set())],
)
def test_values_of_an_attention(query: str, value: str, wanted: set[str]) -> None:
    """Its scores may have been made floats in it first (SEW-D, whose scores stay float)."""
    sources = Layer("query/Op", query), Layer("round/Op", value)
    attention = Layer("scores/Op,softmax/Op,mixed/Op", "bf16", *sources)
    origins = Origins(NAMES, AFTER, {}, frozenset({"scores", "mixed"}))
    assert _attention_on_integers(attention, attention.info, origins) == wanted


def test_one_product_with_others() -> None:
    alone = Layer("mixed/Op", "bf16", Layer("round/Op", "i8"))
    origins = Origins(NAMES, AFTER, {}, frozenset({"scores", "mixed"}))
    assert not _attention_on_integers(alone, alone.info, origins)
