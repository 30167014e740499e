"""A decoder in a file of another runtime, called as the quantized model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from backquant.deploy.session import load_exported
from backquant.errors import InputError, UsageError
from backquant.graph.export import Argument
from backquant.graph.objects import tensors_of

CACHE = "past_key_values"

__all__ = ["CACHE", "ExportedDecoder"]


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
