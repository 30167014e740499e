"""An ExecuTorch program in ExecuTorch's runtime, called like the model it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backquant.deploy.examples import row_major
from backquant.deploy.program import quiet
from backquant.errors import ExportError
from backquant.graph.objects import tensors_of

#: The method of a program that gives the names and sizes of its inputs.
INPUTS = "backquant_inputs"


def registered_kernels() -> frozenset[str]:
    """Names of the operators that this build of the runtime has kernels for: ``"aten::add.out"``.

    >>> "aten::add.out" in registered_kernels()
    True
    """
    with quiet():
        from executorch.runtime import Runtime

        return frozenset(Runtime.get().operator_registry.operator_names)


class ExecuTorchModel:
    """The method ``forward`` of a ``.pte`` file, or of its bytes.

    Takes tensors as the exported program does: positional arguments first, then keyword arguments in
    their order; nested ones and the tensors of objects, such as caches, are flattened. Gives a tensor, or
    a tuple of the flattened outputs.
    Raises ``ExportError`` for a program that the runtime refuses.
    """

    def __init__(self, program: Path | bytes) -> None:
        with quiet():
            from executorch.runtime import Runtime

        try:
            self._program = Runtime.get().load_program(program)
            self._forward = self._program.load_method("forward")
        except RuntimeError as error:
            raise ExportError(
                f"ExecuTorch's runtime cannot load the program: {error}",
                where=str(program) if isinstance(program, Path) else "the program",
                fix="its log on standard error names the operator or the delegate",
            ) from error

    def described_inputs(self) -> dict[str, list[int | None]]:
        """Names and sizes of the inputs as ``export`` wrote them; empty of other programs.

        Raises ``ExportError`` for what says none of these.
        """
        if INPUTS not in self._program.method_names:
            return {}
        told = self._program.load_method(INPUTS).execute([])[0]
        try:
            found = json.loads(bytes(told.tolist()))
            good = all(isinstance(sizes, list) for sizes in found.values())
        except (AttributeError, TypeError, ValueError):
            good = False
        if good:
            return found  # type: ignore[no-any-return]
        raise ExportError(
            "the program does not describe its inputs", where=INPUTS, fix="export the model again"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once. Copies what is not in row-major order. Raises ``ExportError`` when it fails."""
        leaves = pytree.tree_leaves((args, kwargs))
        given = [part for leaf in leaves for part in tensors_of(leaf) or [leaf]]
        inputs = [row_major(t) if isinstance(t, torch.Tensor) else t for t in given]
        try:
            outputs = self._forward.execute(inputs)
        except RuntimeError as error:
            raise ExportError(
                f"ExecuTorch's runtime cannot run the program: {error}",
                where="forward",
                fix="its log on standard error names the operator or the delegate; "
                "leave the part out of the quantization, or report it to ExecuTorch",
            ) from error
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class LoadedProgram:
    """See ``backquant.deploy.session.Loaded``."""

    def __init__(self, path: Path) -> None:
        self._model = ExecuTorchModel(path)
        self.inputs: Mapping[str, Sequence[int | None]] = self._model.described_inputs()

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One call."""
        found = self._model(*(torch.as_tensor(value) for value in inputs))
        return [value.numpy() for value in pytree.tree_leaves(found)]
