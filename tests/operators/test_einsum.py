"""Equations of two operands are matrix products, in a trace and in an export."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import backquant
from backquant.graph import GraphRewriter
from backquant.graph.shapes import GraphValues
from backquant.operators.normal_form import einsum_product

PRODUCTS = {
    "ab,bc->ac": ((3, 4), (4, 5)),
    "ab,cb": ((3, 4), (5, 4)),  # the result in alphabetical order
    "bhqd,bhkd->bhqk": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "bhqk,bkhd->bqhd": ((2, 3, 4, 5), (2, 5, 3, 6)),
    "abcd,cdef->fabe": ((2, 3, 4, 5), (4, 5, 6, 7)),  # several letters of each kind
    "zabc,zcde->zeabd": ((2, 3, 4, 5), (2, 5, 6, 7)),
    "...ij,...jk->...ik": ((2, 3, 4), (4, 5)),
    "h...ij,...jk": ((6, 2, 3, 4), (2, 4, 5)),
    "b...d,de->b...e": ((2, 3, 4, 5), (5, 6)),
    "ebi,eio->beo": ((3, 2, 4), (3, 4, 5)),
}
OTHERS = {
    "i,j->ij": ((3,), (4,)),
    "bi,bi->b": ((2, 3), (2, 3)),
    "bij,bi->bj": ((2, 3, 4), (2, 3)),
    "ij,kl->ik": ((2, 3), (4, 5)),  # sums of one operand alone
    "iij,jk->ik": ((3, 3, 4), (4, 5)),
    "ab,bc->ac": ((3, 1), (4, 5)),  # broadcast
    "...ij,...jk->...ik": ((1, 3, 4), (2, 4, 5)),
}


class Equation(nn.Module):
    """``constant``: which operand is a parameter, if any."""

    def __init__(self, equation: str, shapes: tuple[tuple[int, ...], ...], constant: int | None):
        super().__init__()
        self.equation, self.constant = equation, constant
        if constant is not None:
            self.weight = nn.Parameter(torch.randn(shapes[constant]) / 2)

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        both = list(operands)
        if self.constant is not None:
            both.insert(self.constant, self.weight)
        return torch.einsum(self.equation, *both)


def _traced(equation, shapes, constant=None):
    module = Equation(equation, shapes, constant)
    inputs = [torch.randn(shape) for i, shape in enumerate(shapes) if i != constant]
    graph = fx.Graph()
    arguments = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    if constant is not None:
        arguments.insert(constant, graph.get_attr("weight"))
    graph.output(graph.call_function(torch.einsum, (equation, *arguments)))
    return fx.GraphModule(module, graph), inputs, module(*inputs)


@pytest.mark.parametrize("constant", [None, 0, 1])
@pytest.mark.parametrize("equation", PRODUCTS)
def test_it_is_a_product(equation, constant):
    module, inputs, wanted = _traced(equation, PRODUCTS[equation], constant)
    write = GraphRewriter(module, values=GraphValues(module, tuple(inputs)))
    assert write.apply(einsum_product) == 1
    module.graph.lint()
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert torch.matmul in targets
    assert torch.einsum not in targets
    assert torch.allclose(module(*inputs), wanted, atol=1e-5)


@pytest.mark.parametrize("equation", OTHERS)
def test_what_is_none_stays(equation):
    module, inputs, _ = _traced(equation, OTHERS[equation])
    write = GraphRewriter(module, values=GraphValues(module, tuple(inputs)))
    assert write.apply(einsum_product) == 0


def test_it_stays_where_it_is_named_and_where_no_shape_is_known():
    module, inputs, _ = _traced("ab,bc->ac", PRODUCTS["ab,bc->ac"])
    assert GraphRewriter(module).apply(einsum_product) == 0
    values = GraphValues(module, tuple(inputs))
    kept = GraphRewriter(module, values=values, kept={torch.einsum})
    assert kept.apply(einsum_product) == 0


class Heads(nn.Module):
    """Projections to heads, attention and the way back, as Flax, ViT and T5 variants write them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.ParameterList(torch.randn(16, 2, 8) / 4 for _ in range(3))
        self.out = nn.Parameter(torch.randn(2, 8, 16) / 4)
        self.gate = nn.Linear(16, 16)
        self.last = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("bnc,chd->bnhd", x, w) for w in self.qkv)
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        x = torch.einsum("bqhd,hdc->bqc", torch.einsum("bhqk,bkhd->bqhd", weights, v), self.out)
        return nn.functional.linear(x, self.last, self.gate(x.mean((0, 1))))  # a computed bias


@pytest.mark.parametrize("capture", ["trace", "export"])
@pytest.mark.parametrize("backend", ["x86", "qnnpack", "onnxruntime"])
def test_it_runs_on_integers(backend, capture):
    model, x = Heads().eval(), torch.randn(2, 5, 16)
    quantized = backquant.quantize(
        model, x, backend=backend, calibration=[x], slower="keep", capture=capture
    )
    rows = [row for row in quantized.report.rows if row.multiply_adds]
    assert len(rows) == 8
    # where PyTorch's kernel would multiply floats, the two products of attention stay float
    products = 0 if backend == "onnxruntime" else 2
    assert sum(row.outcome != "quantized" for row in rows) == products, rows
    wanted = model(x)
    assert (quantized(x) - wanted).norm() < 0.05 * wanted.norm()
