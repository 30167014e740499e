"""Modules of several operators, traced as the operators that they are in evaluation mode."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.errors import BackquantError
from backquant.graph.clone import own_buffers
from backquant.graph.example import call
from backquant.graph.shapes import TensorFacts

# The layers of ``nn.Transformer`` in evaluation mode, without the checks that a trace cannot take.
#
# PyTorch's own ``forward`` looks for fused kernels and for causal masks, which depends on the values of
# tensors. What is left is the arithmetic: a mask that happens to be causal is a mask like any other.
#
# Source: PyTorch documentation, ``torch.nn.Transformer``; Xiong et al. 2020, figure 1 (``norm_first``).


def encoder_layer(
    module: Any,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:
    """``nn.TransformerEncoderLayer``.

    >>> import torch
    >>> layer, x = nn.TransformerEncoderLayer(8, 2, 16).eval(), torch.randn(5, 3, 8)
    >>> torch.allclose(encoder_layer(layer, x), layer(x), atol=1e-6)
    True
    """
    rest = (src_mask, src_key_padding_mask)
    if module.norm_first:
        x = src + module._sa_block(module.norm1(src), *rest, is_causal=is_causal)
        return x + module._ff_block(module.norm2(x))
    x = module.norm1(src + module._sa_block(src, *rest, is_causal=is_causal))
    return module.norm2(x + module._ff_block(x))


def _encoder(module: Any, src: Any, mask: Any, is_causal: Any, **more: Any) -> Any:
    return _stack(module, src, src_mask=mask, is_causal=is_causal is True, **more)


def _decoder(module: Any, tgt: Any, memory: Any, tgt_is_causal: Any, **more: Any) -> Any:
    return _stack(module, tgt, memory, tgt_is_causal=tgt_is_causal is True, **more)


def _stack(module: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """The layers of an encoder or a decoder, one after the other."""
    for layer in module.layers:
        value = layer(value, *args, **kwargs)
    return value if module.norm is None else module.norm(value)


def _transformer(
    module: Any,
    src: Any,
    tgt: Any,
    src_mask: Any,
    src_key_padding_mask: Any,
    src_is_causal: Any,
    **more: Any,
) -> Any:
    masks = {"mask": src_mask, "src_key_padding_mask": src_key_padding_mask}
    memory = module.encoder(src, **masks, is_causal=src_is_causal)
    return module.decoder(tgt, memory, **more)


# Which modules of a model are traced as the operators that they are, and what their calls depend on.
#
# PyTorch's attention and transformer layers look at their arguments before they compute: how many dimensions
# there are, whether a mask holds bools. A trace cannot tell. So the model is run once on its example
# inputs, with the arithmetic of ``attention`` and ``transformer`` in the place of PyTorch's own; each call
# of an attention layer is noted, and the trace reads the notes in the same order.


# ``nn.MultiheadAttention`` in evaluation mode, as linear layers and ``scaled_dot_product_attention``.
#
# Nothing here looks into a tensor, so that it can be traced: what the arithmetic depends on (the number of
# dimensions, masks of bools or of floats) is passed in as ``facts``.
#
# 1. Queries, keys and values that are one tensor have one linear layer, as in PyTorch; keys and values that
# are one tensor have one for both, with the rows of the weight that are theirs.
# 2. Without a batch dimension the batch is one.
# 3. Attention weights are computed beside the output; where nobody reads them, they are dropped from a
# graph. A row whose keys are all masked gives zeros then, and no NaN.
#
# Source: PyTorch documentation, ``torch.nn.MultiheadAttention``, and Vaswani et al. 2017, section 3.2.
Facts = Mapping[str, TensorFacts]


def multihead_attention(
    module: nn.MultiheadAttention,
    facts: Facts,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """What ``module(query, key, value, ...)`` returns in evaluation mode.

    ``facts``: of ``query`` and the masks, by the names of the arguments.

    >>> attention, x = nn.MultiheadAttention(8, 2).eval(), torch.randn(5, 3, 8)
    >>> output, weights = multihead_attention(
    ...     attention, {"query": TensorFacts((5, 3, 8), torch.float32)}, x, x, x
    ... )
    >>> torch.allclose(output, attention(x, x, x)[0], atol=1e-6), weights.shape
    (True, torch.Size([3, 5, 5]))
    """
    batched = len(facts["query"].shape) == 3
    if not batched:
        query, key, value = _each(lambda x: x.unsqueeze(0), query, key, value)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
    batch_first = module.batch_first or not batched
    q, k, v = _projected(module, query, key, value)
    if module.bias_k is not None:
        k, v = (_longer(x, b, batch_first) for x, b in ((k, module.bias_k), (v, module.bias_v)))
    q, k, v = (_heads(x, module, batch_first) for x in (q, k, v))
    if module.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    only_causal = is_causal and key_padding_mask is None and not need_weights
    mask = _Mask(None, False)
    if not only_causal:
        more = (module.bias_k is not None) + module.add_zero_attn
        mask = _merged(module, facts, attn_mask, key_padding_mask, more)
    output = F.scaled_dot_product_attention(q, k, v, mask.allowed(), 0.0, only_causal)
    output = output.transpose(1, 2) if batch_first else output.permute(2, 0, 1, 3)
    output = F.linear(output.flatten(2), module.out_proj.weight, module.out_proj.bias)
    weights = None
    if need_weights:
        weights = _weights(q, k, module, mask)
        weights = weights.mean(dim=1) if average_attn_weights else weights
    if not batched:
        output = output.squeeze(0)
        weights = None if weights is None else weights.squeeze(0)
    return output, weights


def _each(change: Any, *values: Any) -> tuple[Any, ...]:
    """``change`` of each value; what is one object stays one object."""
    made: dict[int, Any] = {}
    for value in values:
        if id(value) not in made:
            made[id(value)] = change(value)
    return tuple(made[id(value)] for value in values)


# -- projections ---------------------------------------------------------------------------------------
def _projected(module: nn.MultiheadAttention, query: Any, key: Any, value: Any) -> tuple[Any, ...]:
    size, bias = module.embed_dim, module.in_proj_bias
    if not module._qkv_same_embed_dim:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = [_rows(bias, size * i, size * (i + 1)) for i in range(3)]
        values = (query, key, value)
        return tuple(F.linear(x, w, b) for x, w, b in zip(values, weights, biases, strict=True))
    weight = module.in_proj_weight
    if query is key and key is value:
        return _parts(F.linear(query, weight, bias), 3)
    if key is value:
        q = F.linear(query, weight[:size], _rows(bias, 0, size))
        both = F.linear(key, weight[size:], _rows(bias, size, 3 * size))
        return (q, *_parts(both, 2))
    return tuple(
        F.linear(x, weight[size * i : size * (i + 1)], _rows(bias, size * i, size * (i + 1)))
        for i, x in enumerate((query, key, value))
    )


def _rows(bias: Any, start: int, end: int) -> Any:
    return None if bias is None else bias[start:end]


def _parts(value: Any, count: int) -> tuple[Any, ...]:
    parts = value.chunk(count, dim=-1)
    return tuple(parts[i] for i in range(count))


def _longer(value: Any, bias: Any, batch_first: bool) -> Any:
    """Keys or values with the learned one behind them; ``bias`` is ``[1, 1, features]``."""
    if batch_first:
        return torch.cat([value, bias.expand(value.size(0), -1, -1)], dim=1)
    return torch.cat([value, bias.expand(-1, value.size(1), -1)], dim=0)


def _heads(value: Any, module: nn.MultiheadAttention, batch_first: bool) -> Any:
    """``[batch, heads, length, features of a head]``."""
    shape = (value.size(0), value.size(1), module.num_heads, module.head_dim)
    heads = value.view(*shape)
    return heads.transpose(1, 2) if batch_first else heads.permute(1, 2, 0, 3)


# -- masks ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Mask:
    """Either bools, true where a key is hidden, or floats that are added to the scores."""

    value: Any
    is_bool: bool

    def allowed(self) -> Any:
        """As ``scaled_dot_product_attention`` takes it: bools are true where a key is seen."""
        return self.value.logical_not() if self.is_bool else self.value

    def on(self, scores: Any) -> Any:
        """The scores with the mask."""
        if self.value is None:
            return scores
        if self.is_bool:
            return scores.masked_fill(self.value, float("-inf"))
        return scores + self.value


def _merged(
    module: nn.MultiheadAttention, facts: Facts, attn_mask: Any, padding: Any, more: int
) -> _Mask:
    """Both masks for ``[batch, heads, queries, keys + more]``."""
    masks = []
    if attn_mask is not None:
        known = facts["attn_mask"]
        value = F.pad(attn_mask, (0, more)) if more else attn_mask
        if len(known.shape) == 3:
            value = value.unflatten(0, (-1, module.num_heads))
        masks.append(_Mask(value, known.dtype == torch.bool))
    if padding is not None:
        value = F.pad(padding, (0, more)) if more else padding
        value = value.unsqueeze(1).unsqueeze(2)
        masks.append(_Mask(value, facts["key_padding_mask"].dtype == torch.bool))
    if len(masks) < 2:
        return masks[0] if masks else _Mask(None, False)
    if all(mask.is_bool for mask in masks):
        return _Mask(masks[0].value.logical_or(masks[1].value), True)
    one, other = (_added(mask, facts["query"].dtype) for mask in masks)
    return _Mask(one + other, False)


def _added(mask: _Mask, dtype: torch.dtype) -> Any:
    if not mask.is_bool:
        return mask.value
    return torch.zeros_like(mask.value, dtype=dtype).masked_fill(mask.value, float("-inf"))


def _weights(q: Any, k: Any, module: nn.MultiheadAttention, mask: _Mask) -> Any:
    scores = torch.matmul(q, k.transpose(-2, -1)) * module.head_dim**-0.5
    return F.softmax(mask.on(scores), dim=-1)


#: What is traced in the place of the ``forward`` of modules of several layers, which PyTorch's tracer keeps
#: whole and no backend has an entry for; called with all arguments of that, by name. The ``forward`` of
#: ``nn.TransformerDecoderLayer`` can be traced.
_FORMS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Transformer: _transformer,
    nn.TransformerEncoder: _encoder,
    nn.TransformerEncoderLayer: encoder_layer,
    nn.TransformerDecoder: _decoder,
    nn.TransformerDecoderLayer: nn.TransformerDecoderLayer.forward,
}
COMPOSED = tuple(_FORMS)
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
        if bool(module._forward_hooks or module._forward_pre_hooks):
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
    call(trial, example_inputs)
    return calls


def _note(path: str, calls: list[_Call], given: dict[str, Any]) -> _Call:
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    if any(tensor.is_nested for tensor in tensors.values()):
        raise _StaysWholeError(path, "it is called with nested tensors")
    known = {name: TensorFacts(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    calls.append(known)
    return known


def _form_of(path: str, facts: Callable[[dict[str, Any]], _Call]) -> Callable[..., Any]:
    """``forward(module, ...)`` without looking into tensors; ``facts`` tells of one call."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kind = _kind(module)
        assert kind is not None, path
        bound = inspect.signature(kind.forward).bind(module, *args, **kwargs)
        is_attention = kind is nn.MultiheadAttention
        if not is_attention:
            bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        if not is_attention:
            return _FORMS[kind](module, **given)
        attention: Any = module
        known = facts(given)  # may change arguments in ``given``
        return multihead_attention(attention, known, **given)

    return forward
