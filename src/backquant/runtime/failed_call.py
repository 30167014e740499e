"""The error of a model that cannot run on its inputs, with more than the failing operator's message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from backquant.errors import ArtifactError, BackquantError, EngineError, InputError, UsageError
from backquant.graph.example_spec import ExampleSpec
from backquant.runtime.interpreted import traced

_LONGEST = 300
_RAISED = ("RuntimeError: ", "IndexError: ", "ValueError: ", "TypeError: ", "NotImplementedError: ")


def failed_call(
    error: Exception,
    inputs: tuple[Sequence[Any], Mapping[str, Any]],
    example: ExampleSpec | None,
    source: str,
) -> BackquantError:
    """The error of ours for ``error``, which an operator raised; one of ours is given back.

    ``source`` names the file that the model came from, if any. Where it fails on inputs of the dtypes and
    shapes that it was calibrated with, the file is at fault, else the inputs.

    >>> print(failed_call(RuntimeError("shapes differ"), ((torch.ones(3),), {}), None, ""))
    the model fails on these inputs: shapes differ
      where  float32[3]
    """
    if isinstance(inputs[0], fx.Proxy):
        return traced("torch.fx")
    given = _told(inputs[0], inputs[1])
    needed = "" if example is None else _told(example.args, example.kwargs)
    words = error.what if isinstance(error, BackquantError) else sentence(error)
    words = words[:_LONGEST]
    if (
        source
        and given == needed
        and not isinstance(error, (ArtifactError, EngineError, UsageError))
    ):
        return ArtifactError(
            f"the graph in the file cannot run: {words}",
            where=f"{source}, called with {given}",
            fix="backquant.save(quantized, path) again; what saved this file wrote another graph",
        )
    if isinstance(error, BackquantError):
        return error
    fix = f"inputs like those of the calibration: {needed}" if needed and needed != given else ""
    return InputError(
        f"the model fails on these inputs: {words}",
        where=given or "called without arguments",
        fix=fix,
    )


def sentence(error: Exception) -> str:
    """What an operator says of itself; what runs a recording puts it last.

    >>> text = "The following operation failed in the TorchScript interpreter.\\n...\\nRuntimeError: no such"
    >>> sentence(RuntimeError(text)), sentence(KeyError())
    ('no such', 'KeyError')
    """
    return _last(str(error)) or type(error).__name__


def _last(text: str) -> str:
    first, *rest = text.strip().split("\n")
    if not rest or "TorchScript interpreter" not in first:
        return first
    return next((r.partition(": ")[2] for r in rest if r.startswith(_RAISED)), first)


def _told(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    named = [f"{name}={_one(value)}" for name, value in kwargs.items()]
    return ", ".join([*map(_one, args), *named])[:_LONGEST]


def _one(value: Any) -> str:
    try:
        return _described(value)
    except Exception:  # a nested tensor has no shape, and ``repr`` of a user class may fail
        return type(value).__name__


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        words = [f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"]
        words += [str(value.layout)] * (value.layout is not torch.strided)
        words += [f"on {value.device}"] * (value.device.type != "cpu")
        return " ".join(words)
    sizes = value.get("tensor") if isinstance(value, Mapping) else None
    if isinstance(sizes, (list, tuple)) and "dtype" in value:
        return f"{value['dtype']}{list(sizes)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_one, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_one(item)}' for key, item in value.items())}}}"
    return repr(value)[:60]
