"""An exported program as a model: called like it, with its tensors at their names."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from backquant.errors import CaptureError, UsageError, first_line
from backquant.graph.edit import set_module
from backquant.graph.export.signature import program_signature
from backquant.graph.silence import without_warnings


class ExportedModel(nn.Module):
    """What ``torch.export`` made of a model; ``program`` is left as it is.

    >>> program = torch.export.export(nn.Linear(2, 3).eval(), (torch.zeros(1, 2),))
    >>> model = ExportedModel(program)
    >>> model(torch.zeros(1, 2)).shape, [name for name, _ in model.named_parameters()]
    (torch.Size([1, 3]), ['weight', 'bias'])
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.program = program
        self.__dict__["forward"] = _Forward(program)
        parameters = set(program.graph_signature.parameters)
        for name, tensor in {**program.state_dict, **program.constants}.items():
            if isinstance(tensor, torch.Tensor):
                self._put(name, tensor, name in parameters)

    def _put(self, path: str, tensor: torch.Tensor, is_parameter: bool) -> None:
        owner_path, _, name = path.rpartition(".")
        try:
            owner = self.get_submodule(owner_path)
        except AttributeError:
            owner = nn.Module()
            set_module(self, owner_path, owner)
        if not is_parameter:
            owner.register_buffer(name, tensor)
        elif isinstance(tensor, nn.Parameter):
            owner.register_parameter(name, tensor)
        else:
            owner.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class _Forward:
    """Runs a program; its signature is that of the program."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.__signature__ = program_signature(program)
        self._module: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module is None:
            self._module = self.program.module(check_guards=False)
        return self._module(*args, **kwargs)


def load_exported(path: str | os.PathLike[str]) -> ExportedModel:
    """The program in a ``.pt2`` file that ``torch.export.save`` wrote.

    Raises ``UsageError`` when there is no such file, ``CaptureError`` for one that holds no program (an
    AOTInductor package holds machine code).
    """
    try:
        # PyTorch 2.12 warns that the memory that it reads is not writable; nothing writes to it here
        with without_warnings(UserWarning):
            program = torch.export.load(os.fspath(path))
    except FileNotFoundError:
        raise UsageError("there is no such file", where=str(path), fix="check the path") from None
    except Exception as error:
        reason = first_line(error)
        raise CaptureError(
            f"the file holds no exported program: {reason}",
            where=str(path),
            fix="torch.export.save(torch.export.export(model.eval(), example_inputs), path)",
        ) from error
    return ExportedModel(program)
