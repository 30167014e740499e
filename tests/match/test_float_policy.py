"""Operators that are quantized only between quantized operators."""

from __future__ import annotations

import operator
import sys
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import LeaveFloat, QDQRules
from backquant.lower.kernels.boundary import dequantize
from backquant.match import decide


def outcomes(model: nn.Module, *shape: int) -> dict[str, str]:
    report = backquant.explain(model.eval(), torch.randn(*shape), backend="onnxruntime")
    return {row.node: row.outcome for row in report.rows}


class Transformer(nn.Module):
    """Pre-norm blocks: the residual stream is read by layer norms."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + 0 * x
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def test_residual_additions_of_transformers_stay_float() -> None:
    found = outcomes(Transformer(4), 2, 3, 8)
    additions = {name: outcome for name, outcome in found.items() if name.startswith("add")}
    assert len(additions) == 5
    assert set(additions.values()) == {"float"}
    linears = {n: o for n, o in found.items() if n.startswith(("embed", "layers"))}
    assert set(linears.values()) == {"quantized"}


class Dropping(nn.Module):
    """Dropout where transformers have it: on the stream, behind a branch's last layer, and within it. The
    class token, a hundredth of the rest, is what is read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 16) / 100)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.act, self.stream, self.within, self.behind = nn.GELU(), *map(nn.Dropout, [0.1] * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stream(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1))
        y = self.within(self.act(self.up(self.norm(x))))
        return (x + self.behind(self.down(y)))[:, 0]


@pytest.mark.parametrize(
    "backend", ["x86", "fbgemm", "qnnpack"]
)  # onednn has layer norms on integers
def test_dropout_is_rounded_where_integers_are_read(backend: str) -> None:
    """In evaluation it moves values: for floats nothing is rounded, for a layer on integers its input is."""
    torch.manual_seed(0)
    model, x = Dropping().eval(), torch.randn(2, 9, 16)
    quantized = backquant.quantize(model, x, backend=backend, calibration=[x], slower="keep")
    found = {row.node: row.outcome for row in quantized.report.rows}
    assert [found[name] for name in ("stream", "within", "behind")] == [
        "float",
        "quantized",
        "float",
    ]
    wanted = model(x)
    noise = (quantized(x) - wanted).square().sum() / wanted.square().sum()
    assert noise < 0.001  # 0.6 where the stream is rounded


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.c(torch.relu(x + self.b(x)))


def test_residual_additions_between_convolutions_are_quantized() -> None:
    found = outcomes(Residual(), 1, 4, 8, 8)
    assert set(found.values()) == {"quantized"}


class Tail(nn.Module):
    """A chain whose last reader is float: what stands before it loses its reason, link by link."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.pool, self.norm = nn.MaxPool2d(2), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pool(self.a(x) + self.b(x))
        return self.norm(y.permute(0, 2, 3, 1))


def test_reasons_spread_backwards() -> None:
    report = backquant.explain(Tail().eval(), torch.randn(1, 4, 8, 8), backend="onnxruntime")
    rows = {row.node: row for row in report.rows}
    assert [rows[n].outcome for n in ("a", "b", "add", "pool", "permute")] == [
        "quantized",
        "quantized",
        "float",
        "float",
        "float",
    ]
    reason = rows["add"].reasons[-1]
    assert reason.rule == "float-neighbours"
    assert "no quantized operator reads its result" in reason.admitted


def test_other_backends_are_not_concerned() -> None:
    config = backquant.get_backend_config("onnxruntime").set_qdq(None)
    report = backquant.explain(Tail().eval(), torch.randn(1, 4, 8, 8), backend=config)
    assert {row.node: row.outcome for row in report.rows}["add"] == "quantized"


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.offset = nn.Parameter(torch.randn(1, 4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) + self.offset * 2)


def test_constants_count_where_they_are_quantized() -> None:
    assert outcomes(Constant(), 1, 4, 8, 8)["add"] == "quantized"
    left = backquant.explain(Constant().eval(), torch.randn(1, 4, 8, 8), backend="openvino")
    assert {row.node: row.outcome for row in left.rows}["add"] == "float"


def test_places_in_a_target() -> None:
    """Whatever is asked for; what then stands beside a float operator follows."""
    rules = QDQRules(
        leave_float=(
            LeaveFloat((nn.MaxPool2d,), after=(operator.add,)),
            LeaveFloat((operator.add,), unless_between_quantized=True),
        )
    )
    config = backquant.get_backend_config("onnxruntime").set_qdq(rules)
    mapping = backquant.get_default_qconfig_mapping(config)
    report = backquant.explain(
        Tail().eval(), torch.randn(1, 4, 8, 8), backend=config, qconfig_mapping=mapping
    )
    rows = {row.node: row for row in report.rows}
    assert [rows[n].outcome for n in ("a", "b", "add", "pool", "permute")] == [
        "quantized",
        "quantized",
        "float",
        "float",
        "quantized",
    ]
    reasons = [rows[n].reasons[-1] for n in ("pool", "add")]
    assert [reason.rule for reason in reasons] == ["float-place", "float-neighbours"]
    assert [reason.place for reason in reasons] == [
        "onnxruntime, qdq.leave_float[0]",
        "onnxruntime, qdq.leave_float[1]",
    ]


def test_constants_get_no_nodes_where_they_are_not_quantized() -> None:
    """Also where the operator that reads them is quantized."""
    rules = QDQRules(quantize_constants=False)
    config = backquant.get_backend_config("openvino").set_qdq(rules)
    batch = torch.randn(1, 4, 8, 8)
    quantized = backquant.quantize(Constant().eval(), backend=config, calibration=[batch])
    assert {row.node: row.outcome for row in quantized.report.rows}["add"] == "quantized"
    nodes = quantized.graph_module.graph.nodes
    [add] = [n for n in nodes if n.name == "add"]
    assert [n.op for n in add.all_input_nodes].count("get_attr") == 1  # folded at capture


class Detector(nn.Module):
    """A convolution before a recurrent cell, and a probability that is averaged at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pooled = nn.Conv1d(4, 8, 3), nn.Conv1d(8, 8, 3)
        self.cell, self.last = nn.LSTMCell(8, 8), nn.Conv1d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.max_pool1d(self.conv(x), 2)
        x = self.pooled(x).relu()
        h, _ = self.cell(x.squeeze(-1))
        return self.last(h.unsqueeze(-1)).sigmoid().squeeze(1).mean(1, keepdim=True)


def test_what_moves_and_averages_values_that_only_floats_read_stays_float() -> None:
    torch.manual_seed(0)
    model, batch = Detector().eval(), torch.randn(2, 4, 8)
    quantized = backquant.quantize(model, calibration=[batch], slower="keep")
    rows = {row.node: row for row in quantized.report.rows}
    floats = {name for name, row in rows.items() if row.outcome == "float"}
    assert floats >= {"squeeze", "sigmoid", "squeeze_1", "mean"}
    assert rows["max_pool1d"].outcome == "quantized"
    assert [r.rule for r in rows["squeeze"].reasons] == ["float-neighbours"]
    assert any("2 results" in note for note in quantized.report.notes)


class Halves(nn.Module):
    """Moves between a float operator and one that no entry is for; and before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.exp()
        a, b = x.reshape(-1, 4, 16).transpose(1, 2).chunk(2, 1)
        return self.first(a.transpose(1, 2)) + self.second(b.transpose(1, 2))


def test_moves_of_floats_count_readers_of_integers_without_a_gap_alone() -> None:
    torch.manual_seed(0)
    model = backquant.quantize(Halves().eval(), calibration=[torch.randn(2, 4, 16)], slower="keep")
    outcomes = {row.node: row.outcome for row in model.report.rows}
    assert [outcomes[n] for n in ("reshape", "transpose")] == ["float", "float"]
    assert [outcomes[n] for n in ("transpose_1", "transpose_2")] == ["quantized", "quantized"]


class Shuffled(nn.Module):
    """Two of ShuffleNet's blocks: half of the channels pass by the layer and are joined to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.branches = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for branch in self.branches:
            passed, read = x.chunk(2, dim=1)
            x = torch.cat((passed, branch(read)), dim=1)
            x = x.view(2, 2, 4, 5, 5).transpose(1, 2).reshape(2, 8, 5, 5)
        return self.last(x)


def test_halves_of_integers_are_joined_as_integers_though_no_entry_is_for_the_split() -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 5, 5)
    model = backquant.quantize(Shuffled().eval(), calibration=[batch], slower="keep")
    outcomes = {row.node: row.outcome for row in model.report.rows}
    moved = ("cat", "view", "transpose", "reshape", "cat_1", "view_1", "transpose_1", "reshape_1")
    assert {outcomes[name] for name in moved} == {"quantized"}
    assert not model.graph_module.graph.find_nodes(op="call_function", target=dequantize)


class HalfFloat(Shuffled):
    """What is split comes from an operator that stays float."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed, read = self.stem(x).exp().chunk(2, dim=1)
        return self.last(torch.cat((passed, self.branches[0](read)), dim=1))


def test_halves_of_floats_are_joined_as_floats() -> None:
    torch.manual_seed(0)
    model = backquant.quantize(
        HalfFloat().eval(), calibration=[torch.randn(2, 3, 5, 5)], slower="keep"
    )
    [row] = [row for row in model.report.rows if row.node == "cat"]
    assert [reason.rule for reason in row.reasons] == ["float-neighbours"]


class ManyReaders(nn.Module):
    """A long chain of moves that no entry is for, with a join at each that no integers read."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.stem, self.last = length, nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        joined = []
        for _ in range(self.length):
            x = x.chunk(1, dim=1)[0]
            joined.append(torch.cat((x, x), 1).exp())
        return self.last(x) + sum(joined).sum()


def test_moves_before_many_readers_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    settle = decide.settle_neighbours

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal steps
        steps += event in ("call", "c_call")

    def counted(*args: Any, **kwargs: Any) -> Any:
        sys.setprofile(count)
        try:
            return settle(*args, **kwargs)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(decide, "settle_neighbours", counted)

    def taken(length: int) -> int:
        nonlocal steps
        steps = 0
        found = outcomes(ManyReaders(length), 1, 4, 2, 2)
        assert {found[name] for name in found if name.startswith("cat")} == {"float"}
        return steps

    small, large = taken(20), taken(80)
    assert large < 4.6 * small


class LinearAttention(nn.Module):
    """As diffusion models have it: a product of signed integers, moved to what a convolution reads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(3, 96, 1), nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.chunk(self.qkv(x), 3, dim=1)
        q, k, v = (t.reshape(t.shape[0], 4, 8, -1) for t in (q, k, v))
        context = torch.matmul(k.softmax(-1), v.transpose(-1, -2))
        found = torch.matmul(context.transpose(-1, -2), q.softmax(-2) * 0.3)
        return self.out(found.reshape(x.shape[0], 32, *x.shape[2:]))


def test_moves_take_no_integers_that_their_entry_has_not() -> None:
    x = torch.randn(2, 3, 8, 8)
    model = backquant.quantize(LinearAttention().eval(), x, backend="openvino", calibration=[x])
    moved = next(row for row in model.report.rows if row.node == "reshape_3")
    assert not moved.quantized
    assert moved.reasons[-1].rule == "float-neighbours"
    assert moved.reasons[-1].admitted.endswith("it reads matmul_1, which is qint8")
    assert {row.node for row in model.report.rows if row.quantized} >= {"qkv", "matmul_1", "out"}
