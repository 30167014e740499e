"""25 random graphs: equal to PyTorch's up to the lowered model, or different for a known cause.

``tools/random_graphs.py`` runs thousands.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from against_torch.compare import UNDEQUANTIZED, Lowered, compare
from against_torch.oracle import BACKENDS
from backquant.api import convert_fx, prepare_fx

MODELS = 5  # per backend; no two backends have a seed in common


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_graphs(backend: str) -> None:
    first = list(BACKENDS).index(backend)
    seeds = [first + len(BACKENDS) * i for i in range(MODELS)]
    found = [compare(seed, backend) for seed in seeds]
    unexplained = [(one.seed, one.detail) for one in found if one.verdict == "unexplained"]
    assert unexplained == []
    assert Counter(one.verdict for one in found)["equal"] >= len(found) // 4
    assert sum(one.kernels.checked for one in found) > 2 * len(found)
    off = [
        one.seed for one in found if one.lowered and one.lowered.kind.startswith(("ours", "both"))
    ]
    assert off == []


class CatOfUnobserved(nn.Module):
    """The second entry leads up to a cat that found no observer to share."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.cat([x.reshape(x.shape), x], 1)
        return torch.cat([torch.sigmoid(x), inner], 1)


def test_prepare_of_torch_fails_on_a_cat_of_unobserved_values() -> None:
    """PyTorch's defect: it takes the list of entries for a node. Ours prepares and converts the model."""
    model, x = CatOfUnobserved().eval(), torch.rand(1, 2, 3, 3)
    backend = BACKENDS["x86"]
    with pytest.raises(AttributeError, match="'immutable_list' object has no attribute 'args'"):
        backend.torch_prepare(model, x)
    with pytest.warns(UserWarning, match="which is not quantized"):
        prepared = prepare_fx(model, backend.mapping(), x, backend_config=backend.ours)
    prepared(x)
    torch.testing.assert_close(convert_fx(prepared)(x), model(x), rtol=0, atol=1 / 64)


def test_one_step_of_a_coarser_scale_is_several_of_a_finer_one() -> None:
    """A value of a coarse scale that is rounded the other way."""
    lowered = compare(1206, "qnnpack").lowered
    assert lowered is not None
    assert 1.9 < lowered.ours < lowered.coarser
    assert lowered.kind == "one step of a coarser scale"
    assert Lowered(9.0, 9.0, 9.0, coarser=2.0).kind == "both leave it"
    assert Lowered(9.0, 3.0, 9.0, coarser=2.0).kind == "PyTorch's leaves the reference model"


def test_lowering_of_torch_leaves_integers_where_floats_are_read() -> None:
    """PyTorch's defect: its lowered model raises when it runs. Ours runs."""
    found = compare(2033, "x86")
    assert (found.verdict, found.causes) == ("explained", (UNDEQUANTIZED,))
    assert found.kernels.checked > 0
