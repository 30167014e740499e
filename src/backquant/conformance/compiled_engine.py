"""Compiled code of lowered models (``QuantizedModel.compile``), many in one compilation: it takes seconds for
the smallest of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from backquant.conformance.halves import BuildsTogether
from backquant.conformance.seam import Answer, Build, Ran, RefusedByEngineError
from backquant.conformance.side_by_side import joined_graphs
from backquant.conformance.torch_engines import BuiltHere, TorchEngine, said
from backquant.errors import BackquantError
from backquant.runtime.compiled.graph import compilable
from backquant.runtime.compiled.program import CompiledProgram, compile_graph

COMPILED = "compiled"
_GROUP = 24


@dataclass(frozen=True)
class _Part:
    """A lowered model, its graph in the spelling that is compiled, and inputs of its sizes."""

    lowered: BuiltHere
    graph: fx.GraphModule
    example: tuple[Tensor, ...]


@dataclass(frozen=True)
class CompiledEngine(BuildsTogether[_Part]):
    """The kernels of ``engine``, compiled.

    >>> CompiledEngine("x86").name
    'compiled'
    """

    engine: str
    name: str = COMPILED
    takes_sizes: bool = False
    group: int = _GROUP

    def versions(self) -> dict[str, str]:
        return TorchEngine(self.engine).versions()

    def _ready(self, each: Build) -> _Part | BuiltHere:
        lowered = TorchEngine(self.engine).build(each.prepared, each.example)
        if lowered.ran.in_float:
            return lowered  # nothing of its own is compiled
        return _Part(lowered, compilable(lowered.model.graph_module), each.example)

    def _built(self, parts: Sequence[_Part]) -> list[Answer]:
        examples = [value for part in parts for value in part.example]
        program = compile_graph(
            joined_graphs([part.graph for part in parts]), tuple(examples), None, {}
        )
        made: list[Answer] = []
        first = 0
        for at, part in enumerate(parts):
            count = len(part.example)
            made.append(
                BuiltCode(
                    program, tuple(examples), slice(first, first + count), at, part.lowered.ran
                )
            )
            first += count
        return made


@dataclass(frozen=True)
class BuiltCode:
    """One of the models in a compiled program; the others get their examples when it is called."""

    program: CompiledProgram
    examples: tuple[Tensor, ...]
    own: slice
    at: int
    ran: Ran

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        given = list(self.examples)
        given[self.own] = inputs
        try:
            with torch.no_grad():
                found: Tensor = self.program(tuple(given))[self.at]
        except (BackquantError, RuntimeError) as error:
            raise RefusedByEngineError(said(error)) from error
        return found
