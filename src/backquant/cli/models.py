"""``MODEL`` and ``--inputs`` on the command line: a factory by import path, example inputs by shape."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backquant.errors import UsageError

__all__ = ["import_object", "load_model", "parse_inputs"]


def import_object(text: str, what: str) -> Any:
    """The object that ``package.module:name`` names; the current folder is searched first.

    >>> import_object("math:pi", "MODEL")
    3.141592653589793
    """
    module_name, separator, name = text.partition(":")
    if not separator or not module_name or not name:
        raise UsageError(
            f"{what} {text!r} is not of the form module:name",
            fix=f"write {what} as package.module:name, e.g. mymodels:make_resnet",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise  # the module exists; something that it imports does not
        raise UsageError(
            f"there is no module {module_name!r}",
            where=f"{what} {text!r}",
            fix=f"run from the folder that holds {module_name.split('.')[0]}, or install it",
        ) from error
    for part in name.split("."):
        if not hasattr(target, part):
            public = [n for n in vars(target) if not n.startswith("_")]
            raise UsageError(
                f"{module_name!r} has no {part!r}",
                where=f"{what} {text!r}",
                fix="it has: " + ", ".join(sorted(public)[:12]),
            )
        target = getattr(target, part)
    return target


def load_model(text: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """The model that ``MODEL`` names, with its example inputs where the factory gives them."""
    if text.endswith(".pt2"):
        raise UsageError(
            "a .pt2 file holds a torch.export graph, which this version does not capture",
            where=f"MODEL {text!r}",
            fix="name a factory instead: MODEL is module:factory, which returns the nn.Module",
        )
    found = import_object(text, "MODEL")
    made = found if isinstance(found, nn.Module) else _call(found, text)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the factory returned {type(model).__name__}, not an nn.Module",
            where=f"MODEL {text!r}",
            fix="return model, or (model, example_inputs)",
        )
    if inputs is not None and not isinstance(inputs, tuple):
        inputs = (inputs,)
    return model, inputs


def _call(factory: Any, text: str) -> Any:
    if not callable(factory):
        raise UsageError(
            f"{text!r} is {type(factory).__name__}: neither a model nor a function that makes one",
            where=f"MODEL {text!r}",
            fix="name a function without required arguments that returns the model",
        )
    return factory()


def parse_inputs(texts: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Random tensors of the given shapes and dtypes, one per positional argument.

    >>> [tuple(t.shape) for t in parse_inputs(["1,3,8,8:float32", "2,5:int64"])]
    [(1, 3, 8, 8), (2, 5)]
    """
    return tuple(_parse_input(text) for text in texts)


def _parse_input(text: str) -> torch.Tensor:
    shape_text, _, dtype_text = text.partition(":")
    dtype = getattr(torch, dtype_text or "float32", None)
    try:
        shape = tuple(int(part) for part in shape_text.split(","))
    except ValueError:
        shape = (-1,)
    if not isinstance(dtype, torch.dtype) or min(shape) < 0:
        raise UsageError(
            f"--inputs {text!r} is not a shape with a dtype",
            fix="write sizes, then a colon and a torch dtype: --inputs 1,3,224,224:float32",
        )
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.zeros(shape, dtype=dtype)
