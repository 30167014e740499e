"""Whether a captured graph gives what the model gives, on the example inputs.

A capture follows one way through ``forward``, and writes tensors that are changed in place as values. Where
it loses something (a change under another name, a branch on a stand-in) the graph computes other numbers.

Random numbers are drawn alike, since both calls begin with the same state of PyTorch's generator. But a trace
keeps what ``torch.rand(2, 3)`` gave it as a constant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from backquant.errors import CaptureError
from backquant.graph import Captured, check_inputs
from backquant.graph.clone import own_buffers
from backquant.graph.example import as_arguments
from backquant.graph.example_call import ExampleCall
from backquant.graph.export import ExportedModel, ExportOptions, capture_export
from backquant.graph.export.capture import as_called
from backquant.graph.objects import fresh
from backquant.graph.own_thread import printing_nowhere, untold_of_capture
from backquant.operators.aten import AtenSpeller

_NOISE = 1e-2  # of the power of an output: 20 dB; what folding rounds is far below
_SMALL = 1e-6  # of the power of all outputs: an output below it says nothing
_NUDGE = 1e-6  # of the inputs


class Same(NamedTuple):
    """Notes for the report, and the multiply-adds of one call of the model; 0 where nothing counts them."""

    notes: tuple[str, ...]
    total: int


def require_same(
    model: nn.Module,
    example_inputs: Any,
    found: Any,
    drawn: Mapping[str, str],
    origin: str,
    called: ExampleCall | None = None,
) -> Same:
    """Raise ``CaptureError`` where the graph does something else than ``model``.

    Args:
        called: what ``model`` did with the example inputs before. Where it drew, or the graph gives something
            else, ``model`` is called again: the state of the random numbers is another by now, and so may be
            inputs that the call changes.
        found: what the graph gives for the example inputs.
        drawn: what the graph drew, as ``Draws.found``.
        origin: the name of the capture.

    >>> model, x = nn.Linear(2, 3), torch.ones(1, 2)
    >>> require_same(model, x, model(x), {}, "symbolic trace")
    Same(notes=(), total=6)
    """
    if called is not None and not called.drawn and not _far(called.output, found):
        return Same((), called.multiply_adds)
    again = ExampleCall.of(model, example_inputs)
    wanted, draws, total = again.output, again.drawn, again.multiply_adds
    if again.outside:  # left as it is by request
        return Same((), total)
    is_other = _far(wanted, found)
    if is_other and (changed := _changed_inputs(model, example_inputs)):
        raise CaptureError(
            f"the model changes {changed} in place, so that each call begins with what the last one left",
            where=f"{type(model).__name__}, on the example inputs",
            fix="change a copy in forward: x = x.clone(), or x = x * 2 in place of x.mul_(2)",
        )
    is_other = is_other and not _amplifies(model, example_inputs, wanted)
    is_random = bool(draws) and _is_random(model, example_inputs)
    if not is_other and (drawn or not is_random):
        random = f"draws random numbers at each call: {_listed(draws)}"
        return Same((random,) if is_random else (), total)
    if is_random:
        raise CaptureError(
            f"the model draws random numbers, which the graph of {origin} "
            + ("draws otherwise" if drawn else "holds as constants, drawn once"),
            where=_listed(draws),
            fix="draw them before the call, and pass them as an input: forward takes"
            f" {signature(model.forward)}\n"
            "or draw them in a submodule, which then stays in float; for dropout: model.eval()",
        )
    raise CaptureError(
        f"the graph of {origin} gives other values than the model",
        where="forward, on the example inputs",
        fix="write what changes a tensor in place (x += y, x.relu_(), x[:, 0] = y) as a new value\n"
        "(x = x + y, torch.cat, torch.where), and what depends on values without branches",
    )


def _changed_inputs(model: nn.Module, example_inputs: Any) -> str:
    """The inputs that a call writes other values to; empty if there is none."""
    copies = tree_map_only(torch.Tensor, torch.Tensor.clone, example_inputs)
    check_inputs(model, copies)
    names = list(signature(model.forward).parameters)
    (args, kwargs), (own_args, own_kwargs) = as_arguments(example_inputs), as_arguments(copies)
    given = [*zip(names, args, own_args, strict=False)]
    given += [(name, value, own_kwargs[name]) for name, value in kwargs.items()]
    changed = [name for name, before, after in given if not _are_equal(before, after)]
    return ", ".join(f"its input {name!r}" for name in changed)


def _are_equal(before: Any, after: Any) -> bool:
    pairs = zip(tree_leaves(before), tree_leaves(after), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def _is_random(model: nn.Module, example_inputs: Any) -> bool:
    """Whether what ``model`` draws has an effect on what it gives."""
    found = []
    for seed in range(2):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            found.append(_floats(check_inputs(model, example_inputs)))
    one, other = found
    return len(one) != len(other) or not all(map(torch.equal, one, other))


def _listed(draws: Mapping[str, str]) -> str:
    return "; ".join(f"{name}, {line}" if line else name for name, line in draws.items())


def differs(model: nn.Module, example_inputs: Any, found: Any) -> bool:
    """Whether ``found``, what a graph of ``model`` gives for the example inputs, is not what ``model`` gives.

    Other numbers of outputs are not compared, nor those of a model that amplifies a rounding of its
    inputs as far (it selects by their order, say).

    >>> x = torch.tensor([1.0, 2.0])
    >>> differs(nn.ReLU(), x, torch.tensor([1.0, 2.0])), differs(nn.ReLU(), x, torch.tensor([1.0, 0.0]))
    (False, True)
    """
    wanted = check_inputs(model, example_inputs)
    return _far(wanted, found) and not _amplifies(model, example_inputs, wanted)


def agrees(
    module: fx.GraphModule, model: nn.Module, example_inputs: Any, called: ExampleCall | None = None
) -> bool:
    """Whether ``module``, a graph of ``model``, runs on the example inputs, and gives what ``model`` gives.

    ``called``: what ``model`` gave for them before.

    >>> agrees(fx.symbolic_trace(nn.ReLU()), nn.ReLU(), torch.ones(2))
    True
    """
    args, kwargs = as_arguments(example_inputs)
    try:
        # fx prints what fails in its code
        with torch.random.fork_rng(devices=()), torch.no_grad(), printing_nowhere():
            found = own_buffers(module)(*fresh(args), **fresh(kwargs))
    except Exception:  # what fails is said when the costs are counted
        return False
    if called is not None and not _far(called.output, found):
        return True
    return not differs(model, example_inputs, found)


def _amplifies(model: nn.Module, example_inputs: Any, wanted: Any) -> bool:
    nudged = tree_map_only(torch.Tensor, _nudged, example_inputs)
    return _far(wanted, check_inputs(model, nudged))


def _nudged(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + _NUDGE) if x.is_floating_point() else x


def _far(wanted: Any, found: Any) -> bool:
    if len(_floats(wanted)) != len(_floats(found)):
        return False
    pairs = list(zip(_floats(wanted), _floats(found), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return True
    powers = [(_power(a), _power(a.double() - b.double())) for a, b in pairs]
    least = _SMALL * sum(signal for signal, _ in powers)
    return any(noise > _NOISE * max(signal, least) for signal, noise in powers)


def _floats(values: Any) -> list[torch.Tensor]:
    return [
        value
        for value in tree_leaves(values)
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.device.type == "cpu"
    ]


def _power(x: torch.Tensor) -> float:
    """The power of the finite values."""
    x = x.detach().double()
    return float(x[x.isfinite()].square().sum())


# Exports of models that do something else while they are exported than when they are called.


_AS_CALLED = (
    "arguments that a call leaves out, such as masks, were left out in the export, too: with what the model "
    "makes for them while it is exported it does not run"
)


_FIXED = (
    "sizes are those of the example inputs: a change in place is written as values for one size"
)


_UNTOLD = (
    "exported as if it were called: parts of the model fail where it asks whether it is exported, and makes "
    "less then, such as no mask"
)


def exported_as_called(model: nn.Module, example_inputs: Any, options: ExportOptions) -> Captured:
    """``model``, exported. Where that graph gives other values than the model, or parts of the model cannot
    be exported, it is exported again in another way:

    1. without the arguments that the call leaves out (``backquant.graph.export.capture``);
    2. without telling the model that it is exported; where all parts that failed are of one class, no
       further than to the same failure of one of them;
    3. for fixed input sizes.
    """
    captured, failure = _attempted(model, example_inputs, options)
    failed = set() if captured is None else captured.whole.keys() - options.whole.keys()
    is_same = isinstance(model, ExportedModel) or _agrees(captured, model, example_inputs)
    if captured is not None and is_same and (not failed or isinstance(model, ExportedModel)):
        return captured
    known = _alike(captured, model, failed) if is_same and captured is not None else {}
    others = [(replace(options, around=untold_of_capture, known=known), _UNTOLD)]
    if not is_same and captured is not None:
        others.insert(0, (replace(options, around=as_called), _AS_CALLED))
        if options.dynamic_shapes is None:
            others.append((replace(options, dynamic_shapes={}), _FIXED))
    for other, note in () if isinstance(model, ExportedModel) else others:
        again, _ = _attempted(model, example_inputs, other)
        if again is None or not _agrees(again, model, example_inputs):
            continue
        if not is_same or _is_less(again.whole.keys() - options.whole.keys(), failed):
            return replace(again, notes=(*again.notes, note))
    if captured is None:
        assert failure is not None
        raise failure
    return captured


def _attempted(
    model: nn.Module, example_inputs: Any, options: ExportOptions
) -> tuple[Captured | None, CaptureError | None]:
    try:
        return capture_export(model, example_inputs, AtenSpeller(), options), None
    except CaptureError as error:
        return None, error


def _alike(captured: Captured, model: nn.Module, failed: Collection[str]) -> dict[str, str]:
    """The reasons for which modules failed, by path, where these are all of one class."""
    kinds = {type(model.get_submodule(path)) for path in failed}
    return {path: captured.whole[path] for path in failed} if len(kinds) == 1 else {}


def _is_less(left: Collection[str], failed: Collection[str]) -> bool:
    """Whether all of ``left`` lies within modules that failed before, and not all of these did now.

    >>> _is_less(["a.b"], {"a"}), _is_less(["a"], {"a"}), _is_less(["c"], {"a"})
    (True, False, False)
    """
    inside = all(any(f"{path}.".startswith(f"{top}.") for top in failed) for path in left)
    return inside and set(left) != set(failed)


def _agrees(captured: Captured | None, model: nn.Module, example_inputs: Any) -> bool:
    return captured is not None and agrees(captured.module, model, example_inputs)
