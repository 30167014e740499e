"""Decoders of ``transformers``: example inputs with a cache, and ``generate()`` on a quantized model.

One quantized model serves prefill and decoding: it takes the cache of keys and values that came before,
which may hold no token yet. ``decoder_inputs`` makes arguments of that kind, ``as_generator`` calls a model
with them.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backquant.deploy.session import load_exported
from backquant.errors import InputError, UsageError
from backquant.graph.export import Argument, Interface
from backquant.graph.objects import tensors_of

__all__ = ["CACHE", "ExportedDecoder"]


# A decoder in a file of another runtime, called as the quantized model is.

CACHE = "past_key_values"


class ExportedDecoder:
    """A file that ``export`` wrote of a quantized decoder; gives logits and the longer cache.

    ``taken``: its arguments; the cache is one, with the sizes of its tensors.
    Raises as ``load_exported`` does, and ``UsageError`` for a file without the names of its inputs.
    """

    def __init__(self, path: Path) -> None:
        self._loaded = load_exported(path, torch.get_num_threads())
        if not self._loaded.inputs:
            raise UsageError(
                "the file does not name its inputs",
                where=str(path),
                fix="a file that backquant.export wrote: .onnx, .xml or .pte",
            )
        sizes = {name: tuple(size) for name, size in self._loaded.inputs.items()}
        cached = tuple(size for name, size in sizes.items() if name.startswith(CACHE))
        alone = [Argument(n, (size,)) for n, size in sizes.items() if not n.startswith(CACHE)]
        self.taken = [*alone, *([Argument(CACHE, cached)] if cached else ())]

    def __call__(self, **arguments: Any) -> Any:
        from transformers import DynamicCache
        from transformers.modeling_outputs import CausalLMOutputWithPast

        parts = iter(tensors_of(arguments[CACHE]))
        given = [next(parts) if n.startswith(CACHE) else arguments[n] for n in self._loaded.inputs]
        try:
            found = self._loaded.run([tensor.detach().contiguous().numpy() for tensor in given])
        except Exception as error:
            self._refuse_sizes(given, error)
            raise
        logits, *after = (torch.from_numpy(value) for value in found)
        cache = DynamicCache()
        for index, (keys, values) in enumerate(zip(after[::2], after[1::2], strict=True)):
            cache.update(keys, values, index)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _refuse_sizes(self, given: list[torch.Tensor], error: Exception) -> None:
        """Raise ``InputError`` where ``given``, on which the runtime failed, has not the file's sizes."""
        for tensor, (name, sizes) in zip(given, self._loaded.inputs.items(), strict=True):
            numbers = zip(tensor.shape, sizes, strict=True)
            if any(limit is not None and size != limit for size, limit in numbers):
                written = ["any" if size is None else size for size in sizes]
                raise InputError(
                    f"the file has a fixed size where generate() needs a free one: {name} is {written}",
                    where=f"{name} of {list(tensor.shape)}",
                    fix="backquant.export(quantized, path, dynamic_shapes=backquant.decoder_shapes(model))",
                ) from error


def decoder_inputs(model: nn.Module, input_ids: torch.Tensor, *, cached: int) -> dict[str, Any]:
    """Keyword arguments of a decoder for ``input_ids``, whose first ``cached`` tokens are in the cache.

    For example inputs both ``cached`` and the remaining tokens must be at least 2, because ``torch.export``
    takes sizes of 0 and 1 as fixed. Calibration batches may have ``cached=0``: that is prefill.

    Args:
        model: a causal language model of ``transformers``.
        input_ids: ``[batch, tokens]``.
        cached: how many tokens are in the cache.

    Returns:
        ``input_ids``, ``attention_mask``, ``position_ids`` and ``past_key_values`` (a ``DynamicCache``).

    >>> decoder_inputs(nn.Identity(), torch.zeros(1, 4), cached=4)
    Traceback (most recent call last):
    backquant.errors.UsageError: 4 of 4 tokens are in the cache, and none remains
      where  decoder_inputs: cached
      fix    decoder_inputs(model, input_ids, cached=2)
    """
    batch, length = input_ids.shape
    if not 0 <= cached < length:
        raise UsageError(
            f"{cached} of {length} tokens are in the cache, and none remains",
            where="decoder_inputs: cached",
            fix=f"decoder_inputs(model, input_ids, cached={length // 2})",
        )
    with torch.no_grad():
        first = input_ids[:, : max(cached, 1)]
        cache = model(input_ids=first, past_key_values=_cache(), use_cache=True)[CACHE]
    return {
        "input_ids": input_ids[:, cached:],
        "attention_mask": torch.ones(batch, length, dtype=torch.int64),
        "position_ids": torch.arange(cached, length).expand(batch, -1),
        CACHE: cache if cached else _emptied(cache),
    }


def decoder_shapes(model: nn.Module) -> dict[str, Any]:
    """``dynamic_shapes`` of a decoder's export: batch, new tokens and cached tokens are free.

    Args:
        model: a causal language model of ``transformers``, for its configuration alone.

    Raises ``UsageError`` for a model without a configuration that counts its layers.

    >>> decoder_shapes(nn.Identity())
    Traceback (most recent call last):
    backquant.errors.UsageError: Identity has no configuration that counts its layers
      where  decoder_shapes
      fix    a causal language model of transformers
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        raise UsageError(
            f"{type(model).__name__} has no configuration that counts its layers",
            where="decoder_shapes",
            fix="a causal language model of transformers",
        )
    cached = {0: "batch", 2: "cached"}
    return {
        "input_ids": {0: "batch", 1: "tokens"},
        "attention_mask": {0: "batch", 1: "length"},
        "position_ids": {0: "batch", 1: "tokens"},
        CACHE: {"layers": [{"keys": dict(cached), "values": dict(cached)} for _ in range(layers)]},
    }


def _cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def _emptied(cache: Any) -> Any:
    """A cache of the same layers that holds no token."""
    empty = _cache()
    for index, layer in enumerate(cache.layers):
        empty.update(layer.keys[:, :, :0], layer.values[:, :, :0], index)
    return empty


def as_generator(quantized: nn.Module | str | os.PathLike[str], model: nn.Module) -> Any:
    """A transformers model that computes with the quantized one, so that ``generate()`` works.

    Args:
        quantized: from ``quantize`` with ``decoder_inputs`` as example inputs, or from ``load``; or a
            file that ``export`` wrote of such a model (``.onnx``, ``.xml``, ``.pte``), which its
            runtime computes.
        model: a causal language model of ``transformers``, for its configuration alone: weights on the
            ``meta`` device will do, and none are kept.

    Raises:
        UsageError: the quantized model takes no cache, or ``model`` is of another library.
        InputError: there is no such file.
    """
    if isinstance(quantized, (str, os.PathLike)):
        run: Any = ExportedDecoder(Path(quantized))
        taken = run.taken
    else:
        run, interface = quantized, getattr(quantized, "interface", None)
        known = interface.arguments if isinstance(interface, Interface) else ()
        taken = [argument for argument in known if argument.shapes]
    if CACHE not in [argument.name for argument in taken]:
        raise UsageError(
            "the quantized model takes no cache of keys and values",
            where="as_generator",
            fix="backquant.quantize(model, backquant.decoder_inputs(model, ids, cached=4), ...)",
        )
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise UsageError(
            f"{type(model).__name__} has no generate()",
            where="as_generator",
            fix="transformers.AutoModelForCausalLM.from_config(config)",
        )
    made = copy.copy(model)
    made.__dict__ |= {"_modules": {}, "_parameters": {}, "_buffers": {}}
    made.__dict__ |= {"quantized": run, "taken": taken}
    made.__class__ = _generator_class(type(model))
    return made.eval()


def _generator_class(cls: type) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(cls.forward).bind(self, *args, **kwargs)  # type: ignore[attr-defined]
        named = dict(given.arguments)
        named |= named.pop("kwargs", {})
        return self.quantized(**_arguments(self.taken, named))

    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    members = {
        "forward": forward,
        "device": property(lambda self: torch.device("cpu")),  # noqa: ARG005
        "dtype": property(lambda self: torch.float32),  # noqa: ARG005
        "__doc__": f"{cls.__name__} whose forward is a quantized model's.",
    }
    return type(cls.__name__, (cls,), members)


def _arguments(taken: list[Argument], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the quantized model takes: from ``generate``, or made as the float model makes it."""
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        raise UsageError(
            "generate() from token ids", where="as_generator", fix="generate(input_ids=ids)"
        )
    cache = given.get(CACHE)
    shapes = {argument.name: argument.shapes for argument in taken}
    if cache is None or not tensors_of(cache):
        cache = _empty_cache(shapes[CACHE], len(ids))
    past = int(tensors_of(cache)[0].shape[-2])
    length = past + ids.shape[1]
    mask = given.get("attention_mask")
    if mask is None:
        mask = torch.ones(len(ids), length, dtype=torch.int64)
    positions = given.get("position_ids")
    if positions is None:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
    made = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, CACHE: cache}
    missing = [name for name in shapes if name not in made]
    if missing:
        raise UsageError(
            f"generate() gives no {missing[0]!r}, which the quantized model takes",
            where="as_generator",
            fix="example inputs from backquant.decoder_inputs(model, ids, cached=4)",
        )
    return {name: made[name] for name in shapes}


def _empty_cache(shapes: tuple[tuple[int | str | None, ...], ...], batch: int) -> Any:
    """A cache of as many layers as the quantized model has, with no token in it."""
    cache = _cache()
    numbers = [[n if isinstance(n, int) else 0 for n in shape] for shape in shapes]
    sizes = [(*shape[1:-2], 0, shape[-1]) for shape in numbers]
    for index, (keys, values) in enumerate(zip(sizes[::2], sizes[1::2], strict=True)):
        cache.update(torch.zeros(batch, *keys), torch.zeros(batch, *values), index)
    return cache
