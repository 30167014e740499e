"""The arguments of an exported graph as those of the model's ``forward``."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from backquant.errors import CaptureError
from backquant.graph.fixed_data import Data
from backquant.graph.hooks import forward_in_place
from backquant.graph.objects import field_index
from backquant.graph.structure import Argument, Interface, Structure

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Signature:
    """``parameters``: name and default of each argument; ``given``: the arguments of the export.

    The exported graph has one input for each leaf of ``given``, in order.
    """

    parameters: tuple[tuple[str, Any], ...]
    given: dict[str, Any]
    interface: Interface

    def write(self, graph: fx.Graph, inputs: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Write the placeholders into ``graph``; gives what stands for each input of the export."""
        made: dict[fx.Node, fx.Node] = {}
        remaining = iter(inputs)
        optional = False
        order = list(self.given)
        placeholders: dict[str, fx.Node] = {}
        for name, default in self.parameters:
            optional = optional or default is not inspect.Parameter.empty
            value = default if isinstance(default, _PLAIN) else None
            filled = value if optional else inspect.Parameter.empty
            placeholders[name] = graph.placeholder(name, default_value=filled)
        for name in order:
            for path, _ in pytree.tree_flatten_with_path(self.given[name])[0]:
                start = placeholders[name]
                made[next(remaining)] = [start, *read_path(graph, start, path)][-1]
        return made


def read_path(
    graph: fx.Graph, value: fx.Node, path: Sequence[Any], tree: Any = None
) -> Iterator[fx.Node]:
    """The nodes that read, one key after the other, what stands at ``path`` in ``value``; ``tree``: what that
    is, where fields of named tuples are to be read by their number."""
    for key in path:
        index = field_index(tree, getattr(key, "name", None))
        tree = None if tree is None else key.get(tree)
        if isinstance(key, pytree.GetAttrKey) and index is None:
            value = graph.call_function(getattr, (value, key.name))
        elif index is None and not isinstance(key, (pytree.SequenceKey, pytree.MappingKey)):
            raise CaptureError(
                "an argument is of a class whose tensors cannot be told apart",
                where=f"input {value.name!r}",
                fix="pass tensors, tuples, lists or dicts",
            )
        else:
            place = getattr(key, "idx", getattr(key, "key", index))
            value = graph.call_function(operator.getitem, (value, place))
        yield value


def signature_of(
    forward: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fixed: Mapping[str, Data],
    program: torch.export.ExportedProgram,
) -> Signature:
    """The signature of a model that was exported with these arguments.

    Args:
        forward: that of the model's method, for names and defaults.
        fixed: numbers and texts among the arguments, by argument, which are part of the graph.
    """
    parameters, given = bound(forward, args, kwargs)
    shapes = _shapes(program)
    arguments = []
    for name, default in parameters:
        if name not in given:
            constant = default if default is not inspect.Parameter.empty else None
            arguments.append(Argument(name, (), constant, fixed=fixed.get(name, ())))
            continue
        leaves = pytree.tree_leaves(given[name])
        sizes = [next(shapes) for _ in leaves]
        found = tuple(size for size in sizes if size is not None)
        dtypes = tuple(
            str(leaf.dtype).removeprefix("torch.")
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
        )
        value = None if found else given[name]
        arguments.append(Argument(name, found, value, dtypes, fixed.get(name, ())))
    output = Structure.of(program.call_spec.out_spec)
    return Signature(tuple(parameters), given, Interface(tuple(arguments), output))


def program_signature(program: torch.export.ExportedProgram) -> inspect.Signature:
    """The arguments of an exported program: those by position under their names, then those by keyword.

    >>> program = torch.export.export(torch.nn.ReLU(), (torch.zeros(1),))
    >>> str(program_signature(program))
    '(input)'
    """
    positional, keyword = program.call_spec.in_spec.children()
    known = program.module_call_graph[0].signature
    names = list((known.forward_arg_names if known is not None else None) or ())
    names = names or [f"arg_{i}" for i in range(len(positional.children()))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    by_name = [*names[: len(positional.children())], *keyword.context]
    return inspect.Signature([inspect.Parameter(str(name), kind) for name in by_name])


def in_order(signature: inspect.Signature, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order of the parameters: an export numbers its inputs as they are given.

    >>> in_order(inspect.signature(lambda x, y, **more: x), {"z": 1, "y": 2, "x": 3})
    {'x': 3, 'y': 2, 'z': 1}
    """
    named = {name: kwargs[name] for name in signature.parameters if name in kwargs}
    return named | kwargs


def bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Name and default of every argument of a model, and those that are given, by name.

    ``*args`` are one argument each; of ``**kwargs`` those are listed that are given.

    >>> parameters, given = bound(inspect.signature(lambda x, *rest, **more: x), (1, 2), {"z": 3})
    >>> [name for name, _ in parameters], given
    (['x', 'rest_0', 'z'], {'x': 1, 'rest_0': 2, 'z': 3})
    """
    binding = signature.bind(*args, **kwargs)
    parameters: list[tuple[str, Any]] = []
    given: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            for number, value in enumerate(binding.arguments.get(name, ())):
                parameters.append((f"{name}_{number}", inspect.Parameter.empty))
                given[f"{name}_{number}"] = value
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            more = binding.arguments.get(name, {})
            parameters += [(key, None) for key in more]
            given |= more
        else:
            parameters.append((name, parameter.default))
            if name in binding.arguments:
                given[name] = binding.arguments[name]
    return parameters, given


def _shapes(program: torch.export.ExportedProgram) -> Any:
    """For each input of the user, in order: the sizes of a tensor, or ``None`` for anything else."""
    owned = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is not torch.export.graph_signature.InputKind.USER_INPUT
    }
    places = [n for n in program.graph.nodes if n.op == "placeholder" and n.name not in owned]
    sizes = [_sizes(node.meta.get("val")) for node in places]
    names = Counter(size for found in sizes for size in found or () if isinstance(size, str))
    return iter([None if found is None else _told(found, names) for found in sizes])


def _told(sizes: list[int | str], names: Counter[str]) -> tuple[int | str | None, ...]:
    """Without the names of sizes that stand alone."""
    return tuple(s if isinstance(s, int) or names[s] > 1 else None for s in sizes)


def _sizes(value: Any) -> list[int | str] | None:
    """Numbers, and the names of sizes that may vary."""
    if not isinstance(value, torch.Tensor):
        return None
    return [int(size) if _is_fixed(size) else str(size) for size in value.shape]


def free_axes(node: fx.Node) -> frozenset[int]:
    """The axes of a node's tensor whose size may vary.

    >>> program = torch.export.export(
    ...     torch.nn.ReLU(), (torch.zeros(2, 3),), dynamic_shapes=({0: torch.export.Dim("n")},))
    >>> [free_axes(node) for node in program.graph.nodes if node.name == "relu"]
    [frozenset({0})]
    """
    sizes = _sizes(node.meta.get("val")) or ()
    return frozenset(axis for axis, size in enumerate(sizes) if isinstance(size, str))


def _is_fixed(size: Any) -> bool:
    return isinstance(size, int) or bool(size.node.expr.is_number)


# What a model takes as ``**keywords``, as arguments of their own.
#
# ``torch.export`` (2.13) lists such keywords twice when it compares the inputs with ``dynamic_shapes``, under
# their names and under that of the parameter, and ends in an ``AssertionError``: no size of a model that is
# called with them could be free. An export of a ``forward`` that names them has free sizes.

_KEYWORDS = inspect.Parameter.VAR_KEYWORD


@contextmanager
def named_keywords(model: nn.Module, kwargs: Collection[str]) -> Iterator[None]:
    """The ``forward`` of ``model``, which nobody else uses, names the keywords that it is called with.

    >>> class Sum(nn.Module):
    ...     def forward(self, x, **more):
    ...         return x + more["y"]
    >>> model = Sum()
    >>> with named_keywords(model, ["y"]):
    ...     print(inspect.signature(model.forward), model(1, y=2))
    (x, *, y) 3
    >>> str(inspect.signature(model.forward))
    '(x, **more)'
    """
    signature = inspect.signature(model.forward)
    found = _of(signature)
    given = [name for name in kwargs if name not in signature.parameters]
    if found is None or not given:
        yield
        return
    call = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in given]
    rest = [each for each in signature.parameters.values() if each.kind is not _KEYWORDS]
    vars(forward)["__signature__"] = signature.replace(parameters=[*rest, *named])
    with forward_in_place(model, forward):
        yield


def by_keyword(signature: inspect.Signature, values: Any) -> Any:
    """Values by argument (a mapping; anything else stays as it is), those of ``**keywords`` by their names.

    >>> by_keyword(inspect.signature(lambda x, **more: x), {"x": 1, "more": {"y": 2}})
    {'x': 1, 'y': 2}
    """
    name = _of(signature)
    if name is None or not isinstance(values, Mapping) or not isinstance(values.get(name), Mapping):
        return values
    return {key: value for key, value in values.items() if key != name} | dict(values[name])


def _of(signature: inspect.Signature) -> str | None:
    kinds = {each.kind: each.name for each in signature.parameters.values()}
    return kinds.get(_KEYWORDS)
