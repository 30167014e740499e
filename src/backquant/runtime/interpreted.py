"""The graph of a lowered model, run operator by operator.

Invariants

1. Kernels read memory: calls without it (meta and fake tensors, what ``torch.fx`` traces with), and calls
   that are traced or transformed, are refused before the first operator.
2. The result is that of the plain call: autocast and a default device other than the input's change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from backquant.errors import InputError, UsageError
from backquant.graph.interception import is_exporting, is_watched, stand_ins

_PLAIN = (torch.Tensor, nn.Parameter)


class Interpreted:
    """Calls ``module`` by these rules. Raises ``InputError`` and ``UsageError``.

    >>> run = Interpreted(nn.ReLU())
    >>> run(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    >>> run(torch.ones(1, device="meta"))
    Traceback (most recent call last):
    backquant.errors.InputError: a meta tensor holds no values for kernels to read
      where  float32[1]
      fix    a tensor with values, on the CPU
    """

    def __init__(self, module: Callable[..., Any]) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives for these arguments."""
        tensors = _with_memory(tree_leaves((args, kwargs)))
        if not is_watched():
            return self.module(*args, **kwargs)
        check_not_traced()
        with ExitStack() as plainly:
            if torch.is_autocast_enabled("cpu"):
                plainly.enter_context(torch.autocast("cpu", enabled=False))
            if tensors and tensors[0].device != torch.get_default_device():
                plainly.enter_context(tensors[0].device)
            return self.module(*args, **kwargs)


def check_not_traced() -> None:
    """Raise ``UsageError`` in a trace, where operators get proxies or fake tensors instead of data."""
    found = stand_ins()
    if found:
        raise traced(found)


def traced(by: str) -> UsageError:
    """The error for a model that ``by`` follows.

    >>> traced("torch.jit.trace").what
    'a lowered model runs on data, and is not traced'
    """
    if by == "torch.func":
        return UsageError(
            "a lowered model has no derivatives and no batching rules",
            where="called within a transform of torch.func",
            fix="call it outside of grad, jvp and vmap, with the batch as its first dimension",
        )
    if "torch.onnx" in by:
        return UsageError(
            "a quantized model has no TorchScript, which this exporter of ONNX reads",
            where="called by torch.onnx.export(dynamo=False)",
            fix='backquant.export(quantized, "model.onnx"), with a model quantized for\n'
            'backend="onnxruntime", which torch.onnx.export(quantized, x, dynamo=True) takes, too',
        )
    if by == "torch.export":
        return UsageError(
            "kernels are not exported: torch.export runs models on tensors without values",
            where="called by torch.export, or by torch.onnx.export",
            fix='backquant.export(quantized, "model.onnx"), with a model quantized for a backend that has a\n'
            'target, such as backend="onnxruntime": that one torch.export and torch.onnx.export take, too',
        )
    return UsageError(
        "a lowered model runs on data, and is not traced",
        where=f"called under {by}",
        fix="quantized.graph is its graph; quantized.compile(), and backquant.export, make code of it",
    )


def refuse_export() -> None:
    """Raise the error for kernels under ``torch.export(strict=True)``. Dynamo calls it while it traces."""
    raise traced("torch.export")


def refuse_strict_export() -> None:
    """The same for a reference model, which the other mode exports."""
    raise UsageError(
        "torch.export takes this quantized model with strict=False (the default) only",
        where="called by torch.export.export(strict=True)",
        fix="torch.export.export(quantized, (x,))",
    )


# As ``torch.compiler.assume_constant_result``, which imports Dynamo.
for _refused in (refuse_export, refuse_strict_export):
    _refused._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _with_memory(leaves: list[Any]) -> list[torch.Tensor]:
    """The tensors among the arguments, which hold values."""
    for leaf in leaves:
        if isinstance(leaf, fx.Proxy):
            raise traced("torch.fx")
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            from torch._subclasses.fake_tensor import FakeTensor

            if isinstance(tensor, FakeTensor):  # of an exporter, of a module that holds this one
                raise traced("torch.export" if is_exporting() else "FakeTensorMode")
        if tensor.device.type == "meta":
            raise InputError(
                "a meta tensor holds no values for kernels to read",
                where=f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
                fix="a tensor with values, on the CPU",
            )
    return tensors
