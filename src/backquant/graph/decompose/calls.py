"""Which modules of a model are traced as the operators that they are, and what their calls depend on.

PyTorch's attention and transformer layers look at their arguments before they compute: how many dimensions
there are, whether a mask holds bools. A trace cannot tell. So the model is run once on its example
inputs, with the arithmetic of ``attention`` and ``transformer`` in the place of PyTorch's own; each call
of an attention layer is noted, and the trace reads the notes in the same order.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from backquant.errors import BackquantError
from backquant.graph.clone import own_buffers
from backquant.graph.decompose import transformer
from backquant.graph.decompose.attention import TensorFacts, multihead_attention
from backquant.graph.example import as_arguments
from backquant.graph.objects import fresh

#: Modules of several layers that PyTorch's tracer keeps whole and no backend has an entry for.
COMPOSED = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)

_FORMS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Transformer: transformer.transformer,
    nn.TransformerEncoder: transformer.encoder,
    nn.TransformerEncoderLayer: transformer.encoder_layer,
    nn.TransformerDecoder: transformer.decoder,
    nn.TransformerDecoderLayer: transformer.decoder_layer,
}
_Call = dict[str, TensorFacts]


@dataclass
class Decomposition:
    """The modules of one model that are traced through, by path, and their recorded calls.

    ``whole``: those that stay whole, each with the reason.
    """

    paths: frozenset[str] = frozenset()
    calls: dict[str, list[_Call]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)

    def traced(self) -> dict[str, Callable[..., Any]]:
        """What a trace calls in the place of each module's ``forward``; for one trace.

        >>> layer = nn.TransformerEncoderLayer(4, 2).eval()
        >>> list(decomposition_of(layer, torch.zeros(3, 1, 4)).traced())
        ['self_attn']
        """
        return {path: _form_of(path, self._next(path)) for path in self.paths}

    def _next(self, path: str) -> Callable[[dict[str, Any]], _Call]:
        recorded = iter(self.calls.get(path, ()))

        def facts(given: dict[str, Any]) -> _Call:
            known = next(recorded, None)
            present = {name for name, value in given.items() if isinstance(value, fx.Proxy)}
            unknown = present if known is None else present - set(known)
            if known is None or not all(_is_optional(given[name]) for name in unknown):
                raise fx.proxy.TraceError(
                    f"{path!r} is called otherwise than on the example inputs"
                )
            for name in unknown:
                given[name] = _left_out(given[name])
            return known

        return facts


def _is_optional(value: fx.Proxy) -> bool:
    """Whether it is an argument of the model that is no tensor where a call leaves it out."""
    node = value.node
    return node.op == "placeholder" and node.args in ((None,), (False,), (True,))


def _left_out(value: fx.Proxy) -> Any:
    """What the argument is where it is left out; the graph refuses calls that give it something else."""
    [default] = value.node.args
    said = f"{value.node.target} was not in the example inputs, and can be {default} only"
    same = value.tracer.create_proxy("call_function", operator.is_, (value, default), {})
    torch._assert(same, said)
    return default


def decomposition_of(
    model: nn.Module,
    example_inputs: Any,
    *,
    whole_names: Collection[str] = (),
    whole_classes: Collection[type] = (),
    tops: Collection[str] = (),
) -> Decomposition:
    """The attention and transformer layers of ``model`` that a trace may go through; with "" in ``tops`` the
    model itself, too.

    ``model`` is in evaluation mode, and accepts ``example_inputs``; it is not changed. A module stays
    whole that is named, that has hooks (they would not run), whose class has a ``forward`` of its own, or
    that is called with nested tensors; with it those inside of it that are called by nobody else.

    >>> decomposition_of(nn.TransformerEncoderLayer(4, 2).eval(), torch.zeros(3, 1, 4)).paths
    frozenset({'self_attn'})
    >>> layers = nn.Sequential(nn.TransformerEncoderLayer(4, 2)).eval()
    >>> sorted(decomposition_of(layers, torch.zeros(3, 1, 4)).paths)
    ['0', '0.self_attn']
    """
    found = Decomposition()
    chosen: set[str] = set()
    for path, module in model.named_modules():
        if _kind(module) is None or (not path and path not in tops):
            continue
        if path in whole_names or type(module) in whole_classes:
            continue
        if _has_hooks(module):
            found.whole[path] = "it has hooks, which would not run"
        else:
            chosen.add(path)
    while chosen:
        try:
            calls = _recorded(model, chosen, example_inputs)
        except _StaysWholeError as failure:
            found.whole[failure.path] = failure.reason
            chosen.discard(failure.path)
        else:
            return Decomposition(frozenset(chosen), calls, found.whole)
    return found


def _kind(module: nn.Module) -> type[nn.Module] | None:
    """The class of PyTorch whose ``forward`` a module has; ``stands_for``: see ``ModuleTracer``."""
    own = getattr(type(module), "stands_for", type(module))
    kinds: tuple[type[nn.Module], ...] = (*_FORMS, nn.MultiheadAttention)
    for kind in kinds:
        if isinstance(module, kind) and own.forward is kind.forward:
            return kind
    return None


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class _StaysWholeError(BackquantError):
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path!r} is not taken apart: {reason}", where=path)
        self.path, self.reason = path, reason


def _recorded(model: nn.Module, paths: set[str], example_inputs: Any) -> dict[str, list[_Call]]:
    """The calls of attention layers on the example inputs, in order, by path."""
    trial = own_buffers(model)
    calls: dict[str, list[_Call]] = {}
    for path in paths:
        module = trial.get_submodule(path)
        form = _form_of(path, partial(_note, path, calls.setdefault(path, [])))
        module.__dict__["forward"] = partial(form, module)
    args, kwargs = as_arguments(example_inputs)
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices)):
        trial(*fresh(args), **fresh(kwargs))
    return calls


def _note(path: str, calls: list[_Call], given: dict[str, Any]) -> _Call:
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    if any(tensor.is_nested for tensor in tensors.values()):
        raise _StaysWholeError(path, "it is called with nested tensors")
    known = {name: TensorFacts(value.dim(), value.dtype) for name, value in tensors.items()}
    calls.append(known)
    return known


def _form_of(path: str, facts: Callable[[dict[str, Any]], _Call]) -> Callable[..., Any]:
    """``forward(module, ...)`` without looking into tensors; ``facts`` tells of one call."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kind = _kind(module)
        assert kind is not None, path
        if kind is not nn.MultiheadAttention:
            return _FORMS[kind](module, *args, **kwargs)
        given = _SIGNATURE.bind(module, *args, **kwargs).arguments
        given.pop("self")
        known = facts(given)  # may remove arguments from ``given``
        return multihead_attention(module, known, **given)  # type: ignore[arg-type]

    return forward


_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)
