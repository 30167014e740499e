"""Traces that know the example inputs: what stays computed, what is held, and what stays unknown."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from backquant.errors import CaptureError
from backquant.graph import Captured, capture
from backquant.graph.tracer import text_of


class Net(nn.Module):
    """A linear layer behind what a test does with ``x``."""

    def __init__(self, before: Callable[..., Any]) -> None:
        super().__init__()
        self.before = before
        self.fc = nn.Linear(4, 4)
        self.register_buffer("position", torch.randn(16, 4))

    def forward(self, x, *rest, **named):
        return self.fc(self.before(self, x, *rest, **named))


def traced(model: nn.Module, *example: Any) -> Captured:
    with pytest.raises(CaptureError):  # else the test shows nothing
        captured = capture(model)
        captured.module.recompile()
        assert torch.equal(captured.module(*example), model(*example))
        raise AssertionError("a trace alone does it")
    captured = capture(model, example_inputs=example)
    captured.module.recompile()
    return captured


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_fields_of_a_named_tuple_are_read_by_their_number() -> None:
    model = Net(lambda self, x: x.first[: len(x.second)] + x.second)
    given = Pair(torch.randn(3, 4), torch.randn(2, 4))
    captured = traced(model, given)
    assert torch.equal(captured.module(given), model(given))
    reads = [n for n in captured.module.graph.nodes if n.target is getattr]
    assert {node.args[1] for node in reads} <= {"shape"}


def unpacked(self, x):
    batch, length, width, heads = *x.shape, 2
    return x.reshape(batch, length, heads, width // heads).flatten(2)


def checked(self, x):
    if x.shape[-1] != 4:
        raise ValueError("four channels")
    return x


def by_rank(self, x):
    return {2: x, 3: x * 2}[x.ndim]


def hinted(self, x):
    assert isinstance(x, torch.Tensor) and not isinstance(x, tuple)
    assert isinstance(x.shape, torch.Size) and isinstance(x.shape[0], int)
    return x


def with_limits(self, x):
    return x.masked_fill(x > 1, -torch.finfo(x.dtype).max).clamp(min=-3)


def made_for_it(self, x):
    if len(x.shape) != 3:
        raise ValueError("three axes")
    count = torch.arange(x.shape[1]) + torch.zeros(x.shape[1])
    return x + count[:, None]


def reshaped(self, x):
    assert x.dim() == 3
    return torch.reshape(x, (x.shape[0], -1, 4)).narrow(1, 0, x.size(1)).roll(x.size(0), 0)


def sliced(self, x):
    assert x.size(-1) == self.position.size(-1)
    return x + self.position[: x.shape[1]]


@functools.lru_cache
def _doubled(shape: Any) -> Any:
    return tuple(2 * size for size in shape)


def kept_in_a_cache(self, x):
    """As einops: a cache by sizes, with a way around it for those that have no hash."""
    try:
        rows, columns, _ = _doubled(x.shape)
    except TypeError:
        rows, columns, _ = _doubled.__wrapped__(x.shape)
    return x.repeat(2, 2, 1)[:rows, :columns]


COMPUTED = [
    unpacked,
    checked,
    by_rank,
    hinted,
    with_limits,
    made_for_it,
    reshaped,
    sliced,
    kept_in_a_cache,
]


@pytest.mark.parametrize("before", COMPUTED, ids=lambda each: each.__name__)
def test_sizes_that_decide_nothing_stay_computed(before: Callable[..., Any]) -> None:
    model = Net(before).eval()
    captured = traced(model, torch.randn(2, 3, 4))
    for shape in ((2, 3, 4), (5, 7, 4)):
        x = torch.randn(shape)
        assert torch.equal(captured.module(x), model(x))


def each_row(self, x):
    return torch.stack([row * 2 for row in x])


def counted(self, x):
    return sum(x[:, [index]] for index in range(x.shape[1]))


def by_size(self, x):
    return x * {2: 1.0, 3: 2.0}[x.shape[1]]


def branched(self, x):
    return x * 2 if x.shape[1] > 2 else x


def rounded(self, x):
    return x * int(x.shape[1] ** 0.5)


@pytest.mark.parametrize(
    ("before", "other", "held"),
    [
        (each_row, (3, 3, 4), "len(x) == 2"),
        (counted, (2, 4, 4), "x.shape[1] == 3"),
        (by_size, (2, 2, 4), "x.shape[1] == 3"),
        (branched, (2, 2, 4), "x.shape[1] > 2"),
        (rounded, (2, 4, 4), "x.shape[1] ** 0.5 == 1.7"),
        (checked, (2, 3, 5), "not (x.shape[-1] != 4)"),
        (by_rank, (3, 4), "x.dim() == 3"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_what_decides_is_held_and_checked(
    before: Callable[..., Any], other: tuple[int, ...], held: str
) -> None:
    model = Net(before).eval()
    captured = traced(model, x := torch.randn(2, 3, 4))
    assert torch.equal(captured.module(x), model(x))
    [note] = captured.notes
    assert held in note and f"test_tracer.py:{before.__code__.co_firstlineno + 1}" in note
    with pytest.raises(
        AssertionError, match="prepare the model with example inputs like"
    ) as raised:
        captured.module(torch.randn(other))
    assert held in str(raised.value)


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, mask=None, double=False, mode="add", times=2):
        x = self.fc(x)
        if mask is not None:
            x = x * mask
        if double:
            x = x * 2
        return x + times if mode == "add" else x - times


def test_arguments_that_are_flags_are_those_of_the_example() -> None:
    model, x, mask = Flagged(), torch.randn(2, 4), torch.rand(2, 4)
    captured = traced(model, x)
    assert captured.notes == (
        "arguments are held, and checked at each call: mask is None, double is False, mode == 'add'",
    )
    assert torch.equal(captured.module(x, times=5), model(x, times=5))
    for named in ({"mask": mask}, {"double": True}, {"mode": "sub"}):
        with pytest.raises(AssertionError, match=f"prepared for {next(iter(named))}"):
            captured.module(x, **named)
    with_mask = capture(model, example_inputs=(x, mask, True, "sub"))
    with_mask.module.recompile()
    assert torch.equal(with_mask.module(x, mask, True, "sub"), model(x, mask, True, "sub"))


class Parts(nn.Module):
    """Containers among the arguments and between modules, of which the lengths are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, images, *more, **named):
        total = sum(value * (2 if key == "a" else 1) for key, value in images.items())
        for each in more:
            total = total + each
        if "scale" in named:
            total = total * named["scale"]
        out = self.rnn(total)
        return out[0] if isinstance(out, tuple) and len(out) == 2 else out


def test_containers() -> None:
    model = Parts().eval()
    x, y, z = (torch.randn(2, 3, 4) for _ in range(3))
    with pytest.raises(CaptureError):
        capture(model)
    captured = capture(model, example_inputs={"images": {"a": x, "b": y}, "scale": z})
    captured.module.recompile()
    assert torch.equal(captured.module({"a": y, "b": x}, scale=z), model({"a": y, "b": x}, scale=z))
    captured = capture(model, example_inputs=({"a": x}, y, z))
    captured.module.recompile()
    assert torch.equal(captured.module({"a": y}, z, x), model({"a": y}, z, x))


@pytest.mark.parametrize(
    "before",
    [
        lambda self, x: x if x.sum() > 0 else -x,
        lambda self, x: x[: int(x.abs().max().item())],
        lambda self, x: x * x.argmax().item() if x.argmax().item() else x,
        lambda self, x: x if x.requires_grad else x * 2,
        lambda self, x: x if bool((x > 0).any()) else x * 2,
    ],
)
def test_values_of_tensors_stay_unknown(before: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match="control flow"):
        capture(Net(before), example_inputs=(torch.ones(2, 3, 4),))


def test_a_batch_of_one_is_no_error_to_batch_norms_in_training() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(4)

        def forward(self, x):
            x = self.bn(x)
            return x.flatten(1) if x.shape[-1] == 4 else x

    model = Normed()
    captured = capture(model, example_inputs=(torch.ones(1, 4),))
    assert captured.module.get_submodule("bn").training
    assert int(model.bn.num_batches_tracked) == 0
    assert torch.equal(model.bn.running_mean, torch.zeros(4))


def test_nothing_is_run_and_nothing_is_kept() -> None:
    """Modules are asked for shapes only, and values of the trace are forgotten when it ends."""
    model = Net(unpacked)
    hook = model.fc.register_forward_hook(lambda module, args, output: output * 2)
    captured = capture(model, example_inputs=(torch.randn(2, 3, 4),))
    captured.module.recompile()
    x = torch.randn(5, 2, 4)
    assert torch.equal(captured.module(x), model(x))
    hook.remove()
    assert isinstance(captured.notes, tuple) and model.position.shape == (16, 4)


def test_an_error_of_python_is_the_users() -> None:
    with pytest.raises(CaptureError, match="division by zero"):
        capture(
            Net(lambda self, x: x * (1 / (x.shape[1] - 3))),
            example_inputs=(torch.ones(2, 3, 4),),
        )


def test_texts_stop_at_tensors() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(operator.add, (x, x))
    size = graph.call_method("size", (doubled, 0))
    assert text_of(graph.call_function(operator.mod, (size, 4))) == "add.size(0) % 4"


def or_made(self, x):
    """x_transformers' ``default``."""
    y = x() if callable(x) else x
    return y * y.shape[0]


def without_autocast(self, x):
    with torch.autocast(x.device.type, enabled=False):
        return x * len(x)


def again_a_tensor(self, x):
    """monai's HighResNet: no tensor of the trace is one to functions in C, which read its memory."""
    return x * len(x) + torch.as_tensor(self.fc(x))


def chosen(self, x):
    return torch.where(x > 0, x, 0.0) * torch.where(torch.ones(4) > 0, x.min(), 0.0) * len(x)


def in_place_of_a_size(self, x):
    return x * len(x) + torch.ones(1).expand(x.argmax() * 0 + 4)


@pytest.mark.parametrize(
    "before", [or_made, without_autocast, again_a_tensor, chosen, in_place_of_a_size]
)
def test_values_of_the_trace_where_python_and_c_want_others(before: Callable[..., Any]) -> None:
    model, x = Net(before), torch.randn(3, 4)
    captured = traced(model, x)
    other = torch.randn(3, 4)
    assert torch.equal(captured.module(other), model(other))


def test_a_text_that_is_compared_is_not_held() -> None:
    def by_device(self, x):
        return x * len(x) if x.device.type != "mps" else x

    notes = traced(Net(by_device), torch.randn(3, 4)).notes
    assert any("not (x.device.type == 'mps')" in n or "x.device.type != 'mps'" in n for n in notes)


class Chosen(nn.Module):
    """It asks for the values of a tensor; its result is as large as its input, or as its mask says."""

    def __init__(self, of_the_mask: bool) -> None:
        super().__init__()
        self.of_the_mask = of_the_mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        for row in (x.sum(1) > 0).nonzero():
            made[row] = x[row] * 2
        return made[x.sum(1) > 0] if self.of_the_mask else made


class Around(nn.Module):
    def __init__(self, of_the_mask: bool) -> None:
        super().__init__()
        self.chosen = Chosen(of_the_mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, _ = self.chosen(x).shape
        return x[:rows] * 2


def test_a_module_that_is_left_whole_is_tried_for_the_form_of_its_result() -> None:
    x = torch.randn(3, 4)
    model = Around(of_the_mask=False)
    module = capture(model, example_inputs=(x,), non_traceable_classes=[Chosen]).module
    torch.testing.assert_close(module(x), model(x))


def test_a_form_that_depends_on_values_stays_unknown() -> None:
    with pytest.raises(CaptureError, match="control flow"):
        capture(
            Around(of_the_mask=True),
            example_inputs=(torch.randn(3, 4),),
            non_traceable_classes=[Chosen],
        )
