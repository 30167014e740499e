"""Capture by ``torch.export``: from a model, or from an exported program."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from backquant.errors import CaptureError, UsageError, first_line
from backquant.graph.assemble import DeferredGraphModule, assemble, copied_graph
from backquant.graph.capture import Captured, preserve
from backquant.graph.clone import shallow_copy
from backquant.graph.edit import get_module, made_module, set_module
from backquant.graph.example import as_arguments, check_inputs
from backquant.graph.export.lift import Lifting, Speller, find_leaves
from backquant.graph.export.opaque import NotExportedError, known_calls
from backquant.graph.export.program import (
    Exported,
    check_dims,
    explained,
    export_model,
    quietly,
)
from backquant.graph.export.signature import (
    Signature,
    bound,
    by_keyword,
    in_order,
    program_signature,
    signature_of,
)
from backquant.graph.export.tidy import (
    NotFunctionalError,
    Place,
    refuse_active_dropout,
    tidy,
)
from backquant.graph.fixed_data import fixed_data
from backquant.graph.objects import known_to_export, object_classes
from backquant.graph.silence import without_warnings
from backquant.graph.structure import INTERFACE

# An exported program as a model: called like it, with its tensors at their names.


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
        owner = made_module(self, owner_path)
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


@dataclass(frozen=True)
class ExportOptions:
    """``whole``: modules that stay whole, with the reason each. ``around``: what the export runs in, given
    the model and its arguments. ``known``: as in ``export_model``. The rest as in ``torch.export``."""

    dynamic_shapes: Any = None
    whole: Mapping[str, str] = field(default_factory=dict)
    preserved_attributes: Sequence[str] = ()
    around: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext()
    known: Mapping[str, str] = field(default_factory=dict)


def capture_export(
    model: nn.Module, example_inputs: Any, speller: Speller, options: ExportOptions | None = None
) -> Captured:
    """Capture ``model`` (in evaluation mode) with ``torch.export``. The model is not changed.

    The graph is spelled as a symbolic trace spells it: see ``backquant.graph.export.lift``. A
    submodule that cannot be exported stays whole, and ``Captured.whole`` says why.

    Args:
        model: any ``nn.Module`` in evaluation mode.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        speller: what operators are called; ``backquant.operators`` has the table.

    Raises:
        CaptureError: the model cannot be exported; names the module, the line and the reason.

    >>> class Plain:
    ...     def composed(self, node): return None
    ...     def places(self, overload): return ()
    ...     def gives_truths(self, overload): return False
    ...     def call(self, overload, args, kwargs): return None
    ...     def module(self, overload, args, kwargs): return None
    >>> captured = capture_export(nn.Sequential(nn.Linear(2, 2)).eval(), torch.zeros(1, 2), Plain())
    >>> [(node.op, node.name) for node in captured.module.graph.nodes]
    [('placeholder', 'input_1'), ('call_module', '_0'), ('output', 'output')]
    """
    options = ExportOptions() if options is None else options
    args, kwargs = as_arguments(example_inputs)
    classes = set[type]()  # torch.export takes objects of these only if they are registered
    tried: nn.Module | None = None
    output: Any = None
    if isinstance(model, ExportedModel):
        forward = program_signature(model.program)
    else:
        tried, output = model, check_inputs(model, example_inputs)
        forward = inspect.signature(model.forward)
        classes = object_classes(example_inputs) | object_classes(output)
    fixed = fixed_data(tried, example_inputs, output, bound(forward, args, kwargs)[1])
    signature = partial(signature_of, forward, args, kwargs, fixed)
    with known_to_export(classes):
        return _captured(model, example_inputs, speller, options, signature)


def _captured(
    model: nn.Module,
    example_inputs: Any,
    speller: Speller,
    options: ExportOptions,
    signature: Callable[[ExportedProgram], Signature],
) -> Captured:
    whole = dict(options.whole)
    while True:
        root = shallow_copy(model)
        try:
            exported = _exported(root, example_inputs, options, whole)
            whole.update(exported.opaque)
            return lifted(root, exported, signature, speller, options)
        except NotExportedError as failure:
            if not failure.path or failure.path in whole or isinstance(model, ExportedModel):
                raise explained(failure, model, options.dynamic_shapes) from failure
            whole[failure.path] = failure.reason


def _exported(
    model: nn.Module, example_inputs: Any, options: ExportOptions, whole: dict[str, str]
) -> Exported:
    args, kwargs = as_arguments(example_inputs)
    if isinstance(model, ExportedModel):
        if whole or options.dynamic_shapes is not None:
            raise CaptureError(
                "the model is exported already: its parts and sizes are given",
                where="dynamic_shapes" if options.dynamic_shapes is not None else sorted(whole)[0],
                fix="pass the nn.Module, or leave this out",
            )
        return Exported(model.program)
    forward, shapes = inspect.signature(model.forward), options.dynamic_shapes
    kwargs = in_order(forward, kwargs)
    given = by_keyword(forward, forward.bind(*args, **kwargs).arguments)
    check_dims(by_keyword(forward, shapes), given)
    with options.around(model, args, kwargs):
        return export_model(
            model, args, kwargs, dynamic_shapes=shapes, whole=whole, known=options.known
        )


def lifted(
    root: nn.Module,
    exported: Exported,
    signature_for: Callable[[ExportedProgram], Signature],
    speller: Speller,
    options: ExportOptions,
) -> Captured:
    """The graph module of an exported program over the modules of ``root``, with its scopes."""
    program, graph = _tidied(exported, speller)
    if isinstance(root, ExportedModel):
        refuse_active_dropout(graph)
    owned = _owned(program, graph, root)
    tensors = {node: tensor for node, (_, tensor) in owned.items()}
    leaves = find_leaves(graph, tensors, partial(_module_at, root, tensors, speller))
    for leaf in leaves:
        _out_of_place(leaf.module)
    signature = signature_for(program)
    lifting = Lifting(graph, root, owned, signature, speller, leaves, exported.calls)
    module = assemble(DeferredGraphModule, lifting.run(), root)
    module.meta[INTERFACE] = signature.interface
    preserve(module, root, options.preserved_attributes, "PrepareCustomConfig")
    free = {} if options.dynamic_shapes is None else lifting.free
    whole = dict(exported.opaque)
    return Captured(module, lifting.scopes, "torch.export", exported.notes, whole, free)


def _out_of_place(module: nn.Module) -> None:
    """The program gives a changed value a name of its own, and what reads it reads that."""
    if getattr(module, "inplace", False) is True:
        module.inplace = False  # type: ignore[assignment]


def _tidied(exported: Exported, speller: Speller) -> tuple[ExportedProgram, fx.Graph]:
    program = exported.program
    graph = copied_graph(program.graph)
    try:
        tidy(graph, program.graph_module, speller.composed)
    except NotFunctionalError:
        program = _functional(exported)
        graph = copied_graph(program.graph)
        tidy(graph, program.graph_module, speller.composed)
    kinds = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    for spec in program.graph_signature.output_specs:
        if spec.kind in kinds:
            raise NotExportedError(f"it changes {spec.target!r} in place")
    return program, graph


def _functional(exported: Exported) -> ExportedProgram:
    """The program with changes in place as values. Raises ``NotExportedError``."""
    try:
        with quietly(), known_calls(exported.calls):
            made: ExportedProgram = exported.program.run_decompositions({})
            return made
    except Exception as error:  # torch raises errors of any class
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NotExportedError(
            f"a change in place cannot be written as a value: {reason}"
        ) from error


def _owned(
    program: ExportedProgram, graph: fx.Graph, root: nn.Module
) -> dict[fx.Node, tuple[str, torch.Tensor]]:
    """Path and tensor of each placeholder that stands for a tensor of the model: its own where it has one of
    that name, else (path ``""``) that of the program."""
    places = {node.name: node for node in graph.find_nodes(op="placeholder")}
    held = {**program.state_dict, **program.constants}
    own: dict[str, torch.Tensor] = dict(root.named_parameters(remove_duplicate=False))
    own.update(root.named_buffers(remove_duplicate=False))
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        target = str(spec.target)
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise CaptureError(
                f"the exported program takes a {spec.kind.name.lower()}, which is no tensor",
                where=target,
                fix="export a model whose state is parameters and buffers",
            )
        known = (target, own[target]) if target in own else ("", held[target])
        found[places[spec.arg.name]] = known
    return found


def _module_at(
    root: nn.Module,
    tensors: Mapping[fx.Node, torch.Tensor],
    speller: Speller,
    place: Place,
    nodes: tuple[fx.Node, ...],
) -> nn.Module | None:
    """The module behind some nodes: that of the model, or one built from what a call that one operator makes
    up says."""
    with suppress(AttributeError):
        found = get_module(root, place.path)
        if type(found) is not nn.Module and not getattr(found, "return_indices", False):
            return found
    if len(nodes) != 1 or not place.cls.startswith("torch.nn.modules."):
        return None
    [node] = nodes
    known = fx.node.map_arg((node.args, node.kwargs), lambda value: tensors.get(value, value))
    module = speller.module(node.target, *known)
    if module is not None:
        set_module(root, place.path, module.eval())
    return module


# Calls inside of an export that leave out what a call of the model leaves out.
#
# Models ask whether they are exported, and make a mask then that a call does without. Where the layers that
# get it do not take it (the mask has other sizes than they ask for), the export fails, or gives a graph that
# does: such a model works without the mask only, and is exported without it.

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Calls:
    """The arguments of the calls of one run that were ``None``, by module, in order."""

    def __init__(self) -> None:
        self._none: dict[nn.Module, list[Arguments]] = {}
        self._next: dict[nn.Module, int] = {}

    def begin(self, *_: Any) -> None:
        self._next.clear()

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = tuple(arg is None for arg in args), {k: v is None for k, v in kwargs.items()}
        self._none.setdefault(module, []).append(given)

    def restore(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """``args`` and ``kwargs`` with ``None`` where the same call of the run had it."""
        place = self._next[module] = self._next.get(module, -1) + 1
        seen = self._none.get(module, [])
        if place >= len(seen):
            return args, kwargs
        by_place, by_name = seen[place]
        left_out = (*by_place, *(False for _ in args[len(by_place) :]))
        kept = tuple(None if none else arg for arg, none in zip(args, left_out, strict=False))
        return kept, {k: None if by_name.get(k) else v for k, v in kwargs.items()}


@contextmanager
def as_called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Within the block, submodules of ``model`` get ``None`` where a call with these arguments gives it them.

    ``model`` is run once. It must be a copy that nobody else uses.

    >>> class Masking(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner, self.exported = Adding(), False
    ...     def forward(self, x):
    ...         return self.inner(x, torch.ones(7) if self.exported else None)
    >>> class Adding(nn.Module):
    ...     def forward(self, x, mask):
    ...         return x if mask is None else x + mask
    >>> model = Masking()
    >>> with as_called(model, (torch.zeros(2),), {}):
    ...     model.exported = True
    ...     model(torch.zeros(2))
    tensor([0., 0.])
    """
    calls, modules = _Calls(), [module for path, module in model.named_modules() if path]
    copied = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
    with ExitStack() as hooks, torch.no_grad():
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(calls.note, with_kwargs=True).remove)
        model(*copied[0], **copied[1])
    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(calls.begin).remove)
        for module in modules:
            handle = module.register_forward_pre_hook(calls.restore, with_kwargs=True)
            hooks.callback(handle.remove)
        yield
