"""Spellings that XNNPACK takes: the values are the same, and the delegate takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import backquant
from backquant.deploy.executorch import ExecuTorchModel
from backquant.deploy.executorch.lowering import lower_program
from backquant.deploy.executorch.rewrites import rewrite
from backquant.deploy.executorch.target import read_back
from backquant.deploy.program import Program
from backquant.graph import register_quantized_decomposed
from backquant.graph.silence import quiet


class Behind(nn.Module):
    """``function`` behind a convolution: its input lies channels last in XNNPACK."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.conv(x))


REWRITTEN = {
    "mean": lambda x: x.mean((2, 3)),
    "mean-negative": lambda x: torch.mean(x, (-1, -2)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:1].contiguous().squeeze(0),
    "select": lambda x: x[:, :, -1],
    "unbind": lambda x: x.unbind(1)[1],
    "prelu-of-two-dimensions": lambda x: F.prelu(x.flatten(1), torch.full((144,), 0.2)),
    "softmax": lambda x: x.softmax(-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "vector-norm": lambda x: torch.linalg.vector_norm(x, dim=(1, 3)),
    "power-of-two": lambda x: x.pow(2.0),
    "root": lambda x: x.abs().pow(0.5),
    "inverse-root": lambda x: (x.abs() + 1.0).pow(-0.5),
    "roll": lambda x: torch.roll(x, (-2, 1), (2, -1)),
    "roll-by-more-than-all": lambda x: torch.roll(x, (13, 6), (3, 2)),
    "expand": lambda x: x * x[:, :1].expand(2, 4, 6, 6),
    "pad-that-cuts": lambda x: F.pad(x, (-1, 2, 0, -1)),
    "pad-that-only-cuts": lambda x: F.pad(x, (0, 0, -2, -1, -1, 0)),
    "shift-by-one": lambda x: F.pad(x, (0, 0, 1, -1), value=0.5),
    "softplus": lambda x: F.softplus(40.0 * x),
    "softplus-of-another-steepness": lambda x: F.softplus(x, 2.5, 8),
    "mish": lambda x: F.mish(3.0 * x),
    "softmax-function": lambda x: F.softmax(F.relu(x), 3),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_values_stay(name: str) -> None:
    torch.manual_seed(0)
    model, x = Behind(REWRITTEN[name]).eval(), torch.randn(2, 4, 6, 6)
    with quiet(), torch.no_grad():
        program = torch.export.export(model, (x,)).run_decompositions({})
        before = [str(node.target) for node in program.graph.nodes]
        rewrite(program)
        assert [str(node.target) for node in program.graph.nodes] != before
        torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(1),
        lambda x: x.softmax(1),
        lambda x: x.mean((2, 3), keepdim=True),
        lambda x: torch.linalg.vector_norm(x, 1, dim=-1),
        lambda x: x.abs().pow(0.3),
        lambda x: torch.roll(x, 3),
        lambda x: x[:, :1].expand(2, 4, 6, 6) * 2.0,
    ],
)
def test_others_are_left_alone(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with quiet(), torch.no_grad():
        program = torch.export.export(Behind(function), (torch.randn(2, 4, 6, 6),))
        program = program.run_decompositions({})
        before = [str(node.target) for node in program.graph.nodes]
        rewrite(program)
    assert [str(node.target) for node in program.graph.nodes] == before


def test_softmax_behind_a_convolution_is_right_in_the_runtime(tmp_path) -> None:
    """ExecuTorch 1.5 by itself sums over the channels: off by 0.2 on this input."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, 6, 6)
    net = Behind(REWRITTEN["softmax"]).eval()
    model = backquant.quantize(net, backend="xnnpack", calibration=[x])
    backquant.export(model, tmp_path / "m.pte", example_inputs=x)
    torch.testing.assert_close(ExecuTorchModel(tmp_path / "m.pte")(x), model(x), rtol=0, atol=1e-5)


class Clipped(nn.Module):
    """A clip behind arithmetic, and a value that an operator on integers and one in float read."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = torch.relu(self.one(x))
        other = self.other(one)
        return self.last(self.function(other, one)) + one.sin()


CLIPPED = {
    "add-relu": lambda a, b: torch.relu(a + b),
    "sub-relu": lambda a, b: torch.relu(a - b),
    "mul-relu": lambda a, b: torch.relu(a * b),
    "add-hardtanh": lambda a, b: F.hardtanh(a + b, -0.2, 0.1),
    "mul-relu6": lambda a, b: F.relu6(a * b),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_clips_behind_arithmetic_are_loaded_and_right(name: str, tmp_path) -> None:
    """By itself the delegate does not load the product: its inputs are integers, its result is not."""
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    model = backquant.quantize(Clipped(CLIPPED[name]).eval(), backend="xnnpack", calibration=[x])
    found = backquant.export(model, tmp_path / "m.pte", example_inputs=x)
    assert found.integer_share == 1.0
    got, wanted = ExecuTorchModel(tmp_path / "m.pte")(x), model(x)
    assert 10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()) > 35


class Attending(nn.Module):
    """Attention of ``heads`` heads of queries; ``options`` are those of the function."""

    def __init__(self, heads: int, groups: int, **options: Any) -> None:
        super().__init__()
        self.heads, self.groups, self.options = heads, groups, options
        self.query, self.rest = nn.Linear(16, 16), nn.Linear(16, 2 * 16 // heads * groups)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        rest = self.rest(x).view(batch, length, 2, self.groups, -1)
        key, value = rest.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, **self.options)
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class Repeating(Attending):
    """Each head of keys and values is repeated for two of queries."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        rest = self.rest(x).view(batch, length, 2, self.groups, -1).permute(2, 0, 3, 1, 4)
        key, value = (
            part[:, :, None].expand(-1, -1, 2, -1, -1).reshape(query.shape)
            for part in rest.unbind(0)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        return F.rms_norm(mixed.transpose(1, 2).reshape(batch, length, -1), (16,), eps=1e-6)


class LengthFirst(Attending):
    """The batch is the second axis, and so it lies in memory: what is viewed at the end counts on that."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, _ = x.shape
        x = x.transpose(0, 1)
        query = self.query(x).view(length, batch, self.heads, -1).permute(1, 2, 0, 3)
        rest = self.rest(x).view(length, batch, 2, self.groups, -1)
        key, value = rest.permute(2, 1, 3, 0, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, **self.options)
        return mixed.permute(2, 0, 1, 3).contiguous().view(length * batch, -1)


def padding(batch: int) -> torch.Tensor:
    """The last position of each sample but the first is none."""
    mask = torch.ones(batch, 1, 1, 5, dtype=torch.bool)
    mask[1:, ..., -1] = False
    return mask


ATTENTION = {
    "causal": (Attending(4, 4, is_causal=True), ()),
    "scaled": (Attending(4, 4, scale=0.3), ()),
    "added": (Attending(4, 4), (torch.linspace(-2, 2, 25).view(5, 5),)),
    "padded": (Attending(4, 4), (padding(2),)),
    "repeated": (Repeating(4, 2), ()),
    "length first": (LengthFirst(4, 4), ()),
    "shared": (Attending(4, 2, enable_gqa=True), (padding(2),)),
}


@pytest.mark.parametrize(
    ("name", "free"), [*((name, False) for name in ATTENTION), ("padded", True)]
)
def test_attention_in_the_runtime(name: str, free: bool) -> None:
    """It runs in the delegate; a mask of truth values becomes numbers outside."""
    model, rest = ATTENTION[name]
    inputs = (torch.randn(2, 5, 16), *rest)
    batch = Dim("batch", max=4)
    shapes = [{0: batch} if x.shape[0] == 2 else None for x in inputs] if free else None
    with quiet(), torch.no_grad():
        exported = torch.export.export(
            model.eval(), inputs, dynamic_shapes=shapes and tuple(shapes)
        )
        lowered = lower_program(Program(exported, {}))
        torch.testing.assert_close(ExecuTorchModel(lowered.buffer)(*inputs), model(*inputs))
    outside = set(read_back(lowered.buffer).portable)
    if not free:  # the delegate refuses some slices and views of free sizes
        assert outside <= {"dim_order_ops::_to_dim_order_copy.out", "aten::mean.out"}


def test_one_mask_for_all_layers() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Attending(4, 4), Attending(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(x, mask), mask)

    register_quantized_decomposed()
    inputs = (torch.randn(2, 5, 16), padding(2))
    with quiet(), torch.no_grad():
        program = torch.export.export(Twice(), inputs).run_decompositions({})
        rewrite(program)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.aten.sub.Tensor) == 1
    assert targets.count(torch.ops.aten.bmm.default) == 4


def test_a_prelu_of_two_free_sizes_is_left_as_it_is() -> None:
    """No view can say both, and a view must not hold torch's symbols."""
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.PReLU(4)).eval()
    free = ({0: Dim("batch", max=8), 2: Dim("length", min=2, max=64)},)
    with quiet(), torch.no_grad():
        program = torch.export.export(model, (torch.randn(2, 3, 9),), dynamic_shapes=free)
        program = program.run_decompositions({})
        rewrite(program)
    literals = [
        a for node in program.graph.nodes for a in torch.utils._pytree.tree_leaves(node.args)
    ]
    assert not any(isinstance(a, torch.SymInt) for a in literals)
    assert "aten.view.default" not in [str(node.target) for node in program.graph.nodes]


class NormBehindLinear(nn.Module):
    """The channels of the norm are the second axis, the features of the layers before and behind the last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(channels)
        nn.init.uniform_(self.norm.weight, 0.2, 3.0)
        self.norm.running_mean.normal_()
        self.behind = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(torch.relu(self.norm(self.before(x))))


@pytest.mark.parametrize("sizes", [(8,), (6,)], ids=["as many channels as features", "others"])
@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free batch"])
def test_a_norm_behind_a_linear_layer_is_not_folded_into_it(
    sizes: tuple[int, ...], free: bool, tmp_path
) -> None:
    model = NormBehindLinear(*sizes).eval()
    batches = [torch.randn(4, *sizes, 12) for _ in range(3)]
    made = backquant.quantize(model, calibration=batches, backend="xnnpack")
    shapes = {"x": {0: Dim("batch", min=2, max=16)}} if free else None
    # the layer before the norm gives floats: on integers that are measured at each call
    exported = backquant.export(made, tmp_path / "m.pte", dynamic_shapes=shapes)
    assert exported.integer_share == 1.0
    x = torch.randn(7 if free else 4, *sizes, 12)
    found = ExecuTorchModel(exported.path)(x)
    with torch.no_grad():
        wanted = made(x)
        noise = (wanted - found).square().sum() / wanted.square().sum()
    assert noise < 1e-4


def test_norms_rolls_and_expansions_run_in_the_delegate(tmp_path) -> None:
    """One delegate, and the sum outside of it; ExecuTorch by itself runs powers and expansions outside."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, 6, 6)
    net = Behind(lambda x: torch.roll(F.normalize(x, dim=-1), (2, -1), (2, 3))).eval()
    model = backquant.quantize(net, backend="xnnpack", calibration=[x])
    found = backquant.export(model, tmp_path / "m.pte", example_inputs=x)
    outside = {use.kernel for use in found.kernels if not use.kernel.startswith("XNNPACK")}
    assert outside == {"aten::sum.IntList_out"}
    torch.testing.assert_close(ExecuTorchModel(tmp_path / "m.pte")(x), model(x), rtol=0, atol=1e-5)


def test_whole_numbers_run_in_the_delegate() -> None:
    """Added to floats, they would be cast at each call, outside of it."""
    model, x = Behind(lambda x: (x + 1) * 3).eval(), torch.randn(1, 4, 6, 6)
    with quiet(), torch.no_grad():
        made = lower_program(Program(torch.export.export(model, (x,)), {})).buffer
        torch.testing.assert_close(ExecuTorchModel(made)(x), model(x), rtol=1e-5, atol=1e-5)
    assert read_back(made).portable == ()


@pytest.mark.parametrize("pads", ["by itself", "for a large window"])
def test_padding_of_integers_for_floats(pads: str, tmp_path) -> None:
    """ExecuTorch by itself writes a program that its runtime does not load."""
    torch.manual_seed(0)
    large = nn.Conv2d(4, 4, 7, padding=3, groups=4)
    behind = (lambda x: F.pad(x, (1, 2)).sin()) if pads == "by itself" else large
    # the addition gives integers, which are read in float as well
    net = nn.Sequential(Doubled(), nn.Sequential(Applied(behind), nn.Conv2d(4, 4, 1))).eval()
    x = torch.randn(1, 4, 12, 12)
    model = backquant.quantize(net, backend="xnnpack", calibration=[x])
    backquant.export(model, tmp_path / "m.pte", example_inputs=x)
    found = ExecuTorchModel(tmp_path / "m.pte")(x)
    noise = (found - model(x)).square().sum() / model(x).square().sum()
    assert noise < 1e-4


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


class Applied(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_a_shift_along_time_runs(tmp_path) -> None:
    """As in RWKV: the runtime has no kernel for a padding that takes something off."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.first = nn.ZeroPad2d((0, 0, 1, -1)), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x + self.shift(x))

    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    made = backquant.quantize(Shifted().eval(), backend="xnnpack", calibration=[x])
    backquant.export(made, tmp_path / "m.pte", example_inputs=x)
    torch.testing.assert_close(ExecuTorchModel(tmp_path / "m.pte")(x), made(x), rtol=0, atol=2e-2)
