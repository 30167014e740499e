"""Where attention becomes one kernel, what it means there, and what saved models and records say of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.lower import fuse_followers as fused
from backquant.lower.kernels.boundary import quantize

HEADS, DEEP, ROWS = 2, 8, 6
WIDE = HEADS * DEEP
Attend = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def whole(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def causal(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


def masked(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m.mask)


def functions(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q * 0.35, k.transpose(-2, -1)) + m.bias
    return torch.matmul(F.softmax(scores, dim=-1), v)


def methods(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q.matmul(k.transpose(2, 3)).div(2.8).masked_fill(~m.mask, float("-inf"))
    return scores.softmax(-1).matmul(v)


def dropped(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return m.dropout(torch.softmax((q @ k.transpose(-1, -2)) / 2.8, dim=-1)) @ v


def windows(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(-2, -1)) * 0.35 + m.bias
    scores = scores.view(-1, 2, HEADS, ROWS, ROWS) + m.windows
    return torch.softmax(scores.view(-1, HEADS, ROWS, ROWS), dim=-1) @ v


def in_place(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1)
    scores *= 0.35
    scores += m.bias
    return torch.softmax(scores, -1) @ v


FUSED: dict[str, Attend] = {
    f.__name__: f for f in (whole, causal, masked, functions, methods, dropped, windows, in_place)
}


def other_dimension(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1), 2) @ v


def read_twice(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(q @ k.transpose(-2, -1), -1)
    return weights @ v + weights.mean()


def stacked(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A function of the scores that is none of what the kernel knows."""
    return torch.softmax(torch.tanh(q @ k.transpose(-2, -1)), -1) @ v


NOT_FUSED: dict[str, Attend] = {f.__name__: f for f in (other_dimension, read_twice, stacked)}


class Attends(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE), attend
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.randn(HEADS, ROWS, ROWS))
        self.register_buffer("mask", torch.ones(ROWS, ROWS).tril().bool())
        self.register_buffer("windows", torch.randn(1, 2, 1, ROWS, ROWS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).view(x.shape[0], ROWS, 3, HEADS, DEEP).permute(2, 0, 3, 1, 4)
        found = self.attend(self, parts[0], parts[1], parts[2])
        return self.out(found.transpose(1, 2).reshape(x.shape[0], ROWS, WIDE))


def drawn(attend: Attend) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Attends(attend).eval(), torch.randn(4, ROWS, WIDE)


def quantized_with(attend: Attend, **kwargs: Any) -> tuple[Any, nn.Module, torch.Tensor]:
    model, x = drawn(attend)
    backend = kwargs.pop("backend", "x86")
    made: Any = backquant.quantize(model, x, backend=backend, calibration=[x], **kwargs)
    return made, model, x


def calls(model: Any) -> int:
    """How often a lowered model calls attention's kernel."""
    return sum(
        str(getattr(node.target, "__name__", "")).startswith("attended")
        for node in model.graph.nodes
    )


def without(monkeypatch: pytest.MonkeyPatch, attend: Attend) -> Any:
    """The model as it is lowered without the kernel."""
    with monkeypatch.context() as patch:
        patch.setattr("backquant.lower.lowering._ATTENDING", ())
        return quantized_with(attend)[0]


@pytest.mark.parametrize("name", FUSED)
def test_without_the_library_nothing_else_is_computed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, for other batches too, with and without a recording."""
    made, _, x = quantized_with(FUSED[name])
    plain = without(monkeypatch, FUSED[name])
    assert (calls(made), calls(plain)) == (1, 0)
    assert not any("attention" in use.kernel for use in made.kernels)
    assert [r.node for r in made.left_in_float if "matmul" in r.node] == [
        r.node for r in plain.left_in_float if "matmul" in r.node
    ]
    for batch in (x, x[:2], torch.randn(6, ROWS, WIDE)):
        for _ in range(3):
            assert torch.equal(made(batch), plain(batch))


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.usefixtures("native_library")
def test_with_the_library_integers_are_those_of_float(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, x = quantized_with(FUSED[name])
    use = next(use for use in made.kernels if use.kernel == "backquant.attention")
    assert use.dtype == torch.uint8 and all(node in made.plan.decisions for node in use.nodes)
    rows = {row.node: row for row in made.report.rows}
    assert {rows[node].state for node in use.nodes} == {"float"}
    assert {rows[node].kernel for node in use.nodes} == {"backquant.attention"}

    plain, step = without(monkeypatch, FUSED[name]), made.qparams["out"].inputs[0][0]
    for batch in (x, x[:2], torch.randn(6, ROWS, WIDE)):
        expected = plain(batch)
        # a step of what the last layer reads, times its weights
        limit = step * float(made.get_submodule("out").weight.shape[1])
        results = [made(batch) for _ in range(3)]
        assert all(torch.equal(each, results[0]) for each in results)
        assert (results[0] - expected).abs().max() < limit
        close = (results[0] - expected).abs() < 1e-5 + 1e-5 * expected.abs()
        assert close.float().mean() > 0.9


@pytest.mark.parametrize("name", NOT_FUSED)
@pytest.mark.usefixtures("native_library")
def test_what_is_no_such_attention_stays(name: str) -> None:
    made, model, x = quantized_with(NOT_FUSED[name])
    assert calls(made) == 0 and not any("attention" in use.kernel for use in made.kernels)
    assert (made(x) - model(x)).abs().max() < 0.2


def test_engines_without_the_library_keep_the_operators() -> None:
    assert calls(quantized_with(whole, backend="fbgemm")[0]) == 0


class Given(nn.Module):
    """Mask and causality are arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(
        self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> torch.Tensor:
        q = self.qkv(x).view(x.shape[0], ROWS, HEADS, DEEP).transpose(1, 2)
        found = F.scaled_dot_product_attention(q, q, q, attn_mask, 0.0, is_causal)
        return self.out(found.transpose(1, 2).reshape(x.shape))


@pytest.mark.usefixtures("native_library")
def test_masks_that_are_arguments(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Given().eval(), torch.randn(2, ROWS, WIDE)
    made: Any = backquant.quantize(model, x, backend="x86", calibration=[x])
    backquant.save(made, tmp_path / "model.bq")
    loaded: Any = backquant.load(tmp_path / "model.bq")
    assert calls(made) == calls(loaded) == 1
    mask = torch.randn(ROWS, ROWS)
    for kwargs in ({}, {"attn_mask": mask}, {"is_causal": True}, {"attn_mask": mask > 0.5}):
        expected = [made(x, **kwargs) for _ in range(3)]
        with torch.no_grad():
            exact = model(x, **kwargs)
        kept = ~exact.isnan()
        assert all(torch.equal(each, expected[0]) for each in (*expected, loaded(x, **kwargs)))
        assert (expected[0] - exact)[kept].abs().max() < 0.1


@pytest.mark.usefixtures("native_library")
def test_saved_models_run_with_and_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, attend in FUSED.items():
        made, _, x = quantized_with(attend)
        backquant.save(made, tmp_path / f"{name}.bq")
        loaded: Any = backquant.load(tmp_path / f"{name}.bq")
        assert calls(loaded) == 1 and torch.equal(loaded(x), made(x))
        monkeypatch.setattr("backquant.lower.kernels.attention.is_here", lambda: False)
        elsewhere: Any = backquant.load(tmp_path / f"{name}.bq")
        assert (elsewhere(x) - made(x)).abs().max() < 0.05
        monkeypatch.undo()


class Written(nn.Module):
    """Values are changed between the first product and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.qkv(x)
        scores = q @ q.transpose(1, 2)
        q.add_(1.0)
        return self.out(torch.softmax(scores, -1) @ q)


@pytest.mark.usefixtures("native_library")
def test_what_is_changed_in_between_is_read_before_and_after() -> None:
    torch.manual_seed(0)
    model, x = Written().eval(), torch.randn(2, ROWS, WIDE)
    with torch.no_grad():
        expected = model(x)
    made: Any = backquant.quantize(model, x, backend="x86", calibration=[x])
    assert (made(x) - expected).abs().max() < 0.1


class Modules(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.softmax, self.dropout = nn.Softmax(dim), nn.Dropout(0.1)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = self.dropout(self.softmax(torch.matmul(q, k.transpose(1, 2)) * 0.3))
        return quantize(torch.matmul(weights, v), 0.05, 100, 0, 255, torch.uint8)


@pytest.mark.parametrize(
    ("dim", "training", "count"), [(-1, False, 1), (1, False, 0), (-1, True, 0)]
)
def test_modules_left_in_float(dim: int, training: bool, count: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, ROWS, DEEP) for _ in range(3)]
    traced = _traced(Modules(dim).train(training))
    fused_sites = fused.fuse_attention(traced)
    assert len(fused_sites) == count
    if count:
        traced.recompile()
        assert torch.equal(traced(*given), Modules(dim).eval()(*given))
        assert fused_sites[0].core == ("matmul", "mul", "softmax", "dropout", "matmul_1")


def _traced(module: nn.Module) -> torch.fx.GraphModule:
    class Tracer(torch.fx.Tracer):
        def __init__(self) -> None:
            super().__init__(autowrap_functions=(quantize,))

    tracer = Tracer()
    return torch.fx.GraphModule(module, tracer.trace(module))


def graph_of(steps: int) -> torch.fx.GraphModule:
    """Products whose scores go through so many additions of two tensors each, and come from no product."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    value = x
    for _ in range(steps):
        value = graph.call_function(torch.add, (value, graph.call_function(torch.relu, (x,))))
    value = graph.call_function(torch.softmax, (value, -1))
    value = graph.call_function(torch.matmul, (value, x))
    value = graph.call_function(quantize, (value, 0.1, 0, 0, 255, torch.uint8))
    graph.output(value)
    return torch.fx.GraphModule(nn.Module(), graph)


def test_a_search_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the chain of additions is."""
    counted = itertools.count()
    between = fused._between
    monkeypatch.setattr(fused, "_between", lambda *given: (next(counted), between(*given))[1])
    assert fused.fuse_attention(graph_of(200)) == []
    assert next(counted) < 200


HOSTILE = {
    "an unknown word": [["exec", 1.0]],
    "a text": [["add", "bias"]],
    "no pair": [["add"]],
    "sizes that are texts": [["reshape", ["2"]]],
    "a mask that is a number": [["masked_fill", [1.0, 2.0]]],
    "queries times a tensor": [["queries_mul", None]],
    "no steps": "add",
    "too many steps": [["mul", 1.0]] * 1000,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_files_with_other_steps_are_refused(case: str) -> None:
    from backquant.artifact.kernels import check_arguments
    from backquant.errors import ArtifactError
    from backquant.lower.kernels.attention import attended, attended_whole

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    check_arguments(attended, (x, x, x, [["mul", 0.5], ["add", x]], 0.1, 0), {}, "node a")
    with pytest.raises(ArtifactError, match="cannot be built with between="):
        check_arguments(attended, (x, x, x, HOSTILE[case], 0.1, 0), {}, "node a")
    check_arguments(attended_whole, (x, x, x, None, True, 0.1, False, 0.1, 0), {}, "node a")
    for bad in ((x, x, x, 3, True, 0.1, False), (x, x, 2, None, True, 0.1, False)):
        with pytest.raises(ArtifactError):
            check_arguments(attended_whole, (*bad, 0.1, 0), {}, "node a")
    for bad in ((x, x, x, None, 3, 0.1, False), (x, x, x, None, True, float("nan"), False)):
        with pytest.raises(ArtifactError):
            check_arguments(attended_whole, (*bad, 0.1, 0), {}, "node a")
