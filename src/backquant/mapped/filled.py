"""A model with the weights of files in place of those that it has, or lacks.

1. Every parameter and every buffer of ``state_dict`` is in the files, with its shape and dtype; those that
   are one tensor in the model (tied weights) under one of their names, or under several with equal values.
2. Every tensor in the files has a place in the model, with or without a wrapper's prefix (``module.``).
3. What stands in no ``state_dict`` (tables of positions) comes with the model, so it may not be on ``meta``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import nn

from backquant.errors import UsageError, did_you_mean
from backquant.graph import shallow_copy
from backquant.identifiers import wrapper_prefix

_SHOWN = 3
_FACTORY = "pass what makes the model, which is then called without memory for its weights:\n"


def filled(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    place: Path,
    ignored: Collection[str] = (),
) -> nn.Module:
    """A copy of ``model`` that holds ``tensors``; ``ignored``: patterns of names in files that have no place.

    Raises ``UsageError`` that names what does not fit.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(2, 1)
    >>> filled(model, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, Path("w"))(torch.ones(2))
    tensor([2.], grad_fn=<ViewBackward0>)
    """
    copied = shallow_copy(model)
    slots = dict(_slots(copied))
    prefix = wrapper_prefix(tensors, slots)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    extra = [
        name for name in tensors if name not in slots and not any(fnmatch(name, i) for i in ignored)
    ]
    if extra:
        raise UsageError(
            f"the files hold {_listed(extra)}, which the model has no place for",
            where=str(place),
            fix=did_you_mean(extra[0], slots, f"ignore=[{extra[0]!r}]"),
        )
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, (_, _, wanted) in slots.items():
        if name in tensors:
            _check_fits(name, wanted, tensors[name], place)
            first, known = found.setdefault(id(wanted), (name, tensors[name]))
            if first != name and not torch.equal(known, tensors[name]):
                raise UsageError(
                    f"{first!r} and {name!r} are one tensor in the model, and two in the files",
                    where=str(place),
                    fix="make the model without tied weights: tie_word_embeddings=False",
                )
    missing = [name for name, (_, _, wanted) in slots.items() if id(wanted) not in found]
    if missing:
        raise UsageError(
            f"the files lack {_listed(missing)}",
            where=str(place),
            fix=did_you_mean(
                missing[0], tensors, "write all of them: model.save_pretrained(folder)"
            ),
        )
    made: dict[int, torch.Tensor] = {}
    for owner, key, wanted in slots.values():
        value = made.setdefault(id(wanted), _like(wanted, found[id(wanted)][1]))
        table = owner._parameters if key in owner._parameters else owner._buffers
        table[key] = value  # type: ignore[assignment]
    _check_no_meta(copied)
    return copied


def _slots(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, torch.Tensor]]]:
    """Rule 1: by name the module, the name in it, and the tensor."""
    for prefix, owner in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for key, tensor in owner._parameters.items():
            if tensor is not None:
                yield f"{start}{key}", (owner, key, tensor)
        for key, buffer in owner._buffers.items():
            if buffer is not None and key not in owner._non_persistent_buffers_set:
                yield f"{start}{key}", (owner, key, buffer)


def _check_fits(name: str, wanted: torch.Tensor, found: torch.Tensor, place: Path) -> None:
    if wanted.shape != found.shape:
        raise UsageError(
            f"{name!r} is {list(found.shape)} in the files, and {list(wanted.shape)} in the model",
            where=str(place),
            fix="make the model with the configuration that the files were written with",
        )
    if wanted.dtype != found.dtype:
        dtype = str(found.dtype)
        raise UsageError(
            f"{name!r} is {dtype} in the files, and {wanted.dtype} in the model",
            where=str(place),
            fix=f"model.to({dtype}), or in the function that makes it",
        )


def _like(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    if not isinstance(wanted, nn.Parameter):
        return found
    return nn.Parameter(found, requires_grad=wanted.requires_grad)


def _check_no_meta(model: nn.Module) -> None:
    """Rule 3."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UsageError(
                f"the buffer {name!r} has no values: it is on meta, and no file holds it",
                where="model",
                fix=f"{_FACTORY}quantize_files(lambda: {type(model).__name__}(...), files, to)",
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
