"""Every aten overload that an operator lists, in the spelling of entries: the same numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backquant.operators.aten import AtenSpeller
from backquant.operators.index import all_operators
from backquant.operators.operator import INPUT, Operator, Weight

#: computed by what ``composed`` makes of it, or only in graphs of one backend's entries
WITHOUT_CALL = {"convolution", "max_pool2d_with_indices", "contiguous_strides"}


def _cases() -> Iterator[tuple[Operator, Any]]:
    for one in all_operators():
        for overload in one.aten:
            if one.name not in WITHOUT_CALL and not str(overload).split(".")[1].endswith("_"):
                yield one, overload


def _arguments(one: Operator) -> tuple[Any, ...]:
    torch.manual_seed(0)
    inputs = iter(one.sample.inputs())

    def value(item: Any) -> Any:
        if item is INPUT:
            return next(inputs)
        if isinstance(item, Weight):
            made = torch.rand(item.shape)
            return made.round().long() if item.is_index else made
        return [next(inputs) for _ in item] if isinstance(item, list) else item

    return tuple(value(item) for item in one.sample.aten_call)


@pytest.mark.parametrize(
    ("one", "overload"), list(_cases()), ids=[str(overload) for _, overload in _cases()]
)
def test_the_same_numbers(one: Operator, overload: Any) -> None:
    args = _arguments(one)
    wanted = overload(*args)
    call = AtenSpeller().call(overload, args, {})
    assert call is not None
    if call.kind == "call_method":
        got = getattr(call.args[0], call.target)(*call.args[1:], **call.kwargs)
    else:
        got = call.target(*call.args, **call.kwargs)
    if isinstance(wanted, (list, tuple)):
        got, wanted = torch.cat(got), torch.cat(wanted)
    assert got == wanted if isinstance(wanted, int) else torch.equal(got, wanted)
    spellings = (*one.functions, *one.methods)
    assert call.target in spellings or one.name in ("mm", "addmm")


def test_spellings_that_entries_use() -> None:
    speller, x = AtenSpeller(), torch.ones(2, 3)
    aten = torch.ops.aten
    assert speller.call(aten.add.Tensor, (x, 1), {}).target is operator.add
    assert speller.call(aten.add.Tensor, (x, x), {"alpha": 2}).target is torch.add
    assert speller.call(aten.view.default, (x, [3, -1]), {}).args == (x, 3, -1)
    assert speller.call(aten.layer_norm.default, (x, [3]), {}).args == (x, (3,))
    assert speller.call(aten.cumprod.default, (x, 0), {}) is None


@pytest.mark.parametrize(
    ("overload", "args", "function"),
    [
        (
            torch.ops.aten.conv2d.padding,
            (torch.rand(1, 2, 5, 5), torch.rand(3, 2, 3, 3), None, [1, 1], "same"),
            F.conv2d,
        ),
        (torch.ops.aten.squeeze.dims, (torch.rand(1, 2, 1), [0, 2]), torch.squeeze),
        (torch.ops.aten.movedim.intlist, (torch.rand(1, 2, 5), [0], [2]), torch.movedim),
        (torch.ops.aten.constant_pad_nd.default, (torch.rand(1, 2, 5), [1, 2], 3.0), F.pad),
        (torch.ops.aten.upsample_nearest2d.vec, (torch.rand(1, 2, 4, 4), [8, 8], None), F.interpolate),
        (
            torch.ops.aten.upsample_bilinear2d.vec,
            (torch.rand(1, 2, 4, 4), None, True, [2.0, 2.0]),
            F.interpolate,
        ),
        (torch.ops.aten.embedding.default, (torch.rand(5, 2), torch.tensor([1, 4]), 2), F.embedding),
    ],
)  # fmt: skip
def test_overloads_with_other_arguments(
    overload: Any, args: tuple[Any, ...], function: Any
) -> None:
    call = AtenSpeller().call(overload, args, {})
    assert call is not None and call.target is function
    assert torch.equal(function(*call.args, **call.kwargs), overload(*args))


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 3),
        nn.Linear(4, 3, bias=False),
        nn.LayerNorm(4),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.RMSNorm(4),
        nn.GELU("tanh"),
        nn.SiLU(),
        nn.LeakyReLU(0.2),
        nn.Hardtanh(-2.0, 1.0),
        nn.Softmax(-1),
        nn.Sigmoid(),
        nn.ELU(0.5),
    ],
    ids=str,
)
def test_modules_are_built_again(module: nn.Module) -> None:
    """From a program, which has tensors and no modules."""
    _check_rebuilt(module, torch.randn(2, 4))


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 6, 3, 2, 1, groups=2),
        nn.Conv2d(4, 6, 3, padding="same", bias=False),
        nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2, dilation=2),
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.PReLU(4),
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.ReLU6(),
    ],
    ids=str,
)
@pytest.mark.parametrize("decomposed", [False, True])
def test_image_modules_are_built_again(module: nn.Module, decomposed: bool) -> None:
    _check_rebuilt(module, torch.randn(2, 4, 7, 7), decomposed)


def _check_rebuilt(module: nn.Module, x: torch.Tensor, decomposed: bool = False) -> None:
    from warnings import catch_warnings, simplefilter

    from backquant.graph.export import ExportedModel, capture_export

    model = nn.Sequential(module).eval()
    program = torch.export.export(model, (x,))
    if decomposed:
        with catch_warnings():
            simplefilter("ignore", FutureWarning)
            program = (
                program.run_decompositions({})
                if "Adaptive" in str(module)
                else program.run_decompositions()
            )
    captured = capture_export(ExportedModel(program), x, AtenSpeller())
    with torch.no_grad():
        assert torch.allclose(captured.module(x), model(x), atol=1e-6)
    if not decomposed:
        [built] = [captured.module.get_submodule("0")]
        assert type(built) is type(module)
        assert str(built).replace("(2, 2)", "2") == str(module).replace("(2, 2)", "2") or (
            isinstance(module, (nn.MaxPool2d, nn.AvgPool2d))
        )
        for name, tensor in module.named_parameters():
            assert built.get_parameter(name).data_ptr() == tensor.data_ptr()


def test_elu_keeps_its_factors() -> None:
    """``F.elu`` has no factors of the input and of the result."""
    call = AtenSpeller().call(torch.ops.aten.elu.default, (1, 0.5, 2.0, 3.0), {})
    assert call is not None and call.args == (1, 0.5, 2.0, 3.0)
    plain = AtenSpeller().call(torch.ops.aten.elu.default, (1, 0.5), {})
    assert plain is not None and plain.target is F.elu
