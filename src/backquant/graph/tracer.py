"""The symbolic tracer: which modules stay whole, and where tracing failed."""

from __future__ import annotations

import functools
import inspect
import linecache
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx, nn
from torch.fx.proxy import Scope as FxScope
from torch.nn.utils import rnn

from backquant.graph.by_mode import ByMode
from backquant.graph.hooks import (
    forward_in_place,
    has_hooks,
    has_own_methods,
    only_users_hooks,
    with_hooks,
)
from backquant.graph.in_place import Changeable
from backquant.graph.interception import folder
from backquant.graph.structure import dataclasses_as_dicts

# What a trace held of its example inputs: checks of it in the graph, and how it is said.

_SIGNS = {
    **{operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<="},
    **{operator.gt: ">", operator.ge: ">=", operator.add: "+", operator.sub: "-"},
    **{operator.mul: "*", operator.truediv: "/", operator.floordiv: "//", operator.mod: "%"},
    **{operator.pow: "**", operator.and_: "&", operator.or_: "|"},
}
_METHODS = frozenset({"size", "dim", "numel", "stride", "nelement", "is_floating_point"})
_SHOWN = 4
_OF_A_LINE = 2
_LONGEST = 120


class Held(NamedTuple):
    """``value`` of ``node``, which the lines at ``line`` (``file:line: source``) asked for."""

    value: Any
    line: str


def add_checks(graph: fx.Graph, held: dict[fx.Node, Held]) -> list[tuple[fx.Node, fx.Node]]:
    """Let ``graph`` raise ``AssertionError`` where a value is not what was held; returns the new nodes, each
    behind the one whose value it checks.

    >>> graph = fx.Graph()
    >>> size = graph.call_method("size", (graph.placeholder("x"), 0))
    >>> made = add_checks(graph, {size: Held(2, "")})
    >>> _ = graph.output(size)
    >>> module = fx.GraphModule({}, graph)
    >>> module(torch.ones(2))
    2
    >>> module(torch.ones(3))
    Traceback (most recent call last):
    AssertionError: prepared for x.size(0) == 2: prepare the model with example inputs like those of this call
    """
    made: list[tuple[fx.Node, fx.Node]] = []
    for node, (value, line) in held.items():
        said = (
            f"prepared for {_fact(node, value)}{_at(line)}: prepare the model with example inputs like those "
            "of this call"
        )
        with graph.inserting_before(_behind(node)):
            condition = _condition(graph, node, value)
            new = {condition, graph.call_function(torch._assert, (condition, said))} - {node}
        made += [(node, each) for each in new]
    return made


def _behind(node: fx.Node) -> fx.Node:
    """The first node behind ``node`` that may be: placeholders stay in front."""
    after = node.next
    while after.op == "placeholder":
        after = after.next
    return after


def _condition(graph: fx.Graph, node: fx.Node, value: Any) -> fx.Node:
    if value is True and node.op != "placeholder":
        return node
    if value is False and node.op != "placeholder":
        return graph.call_function(operator.not_, (node,))
    same: Callable[..., Any] = (
        operator.is_ if value is None or isinstance(value, bool) else operator.eq
    )
    return graph.call_function(same, (node, value))


def notes_of(held: dict[fx.Node, Held]) -> tuple[str, ...]:
    """What was held, for a report: arguments by name, answers by the lines that asked.

    >>> notes_of({fx.Graph().placeholder("flag"): Held(False, "")})
    ('arguments are held, and checked at each call: flag is False',)
    """
    arguments = [_fact(n, each.value) for n, each in held.items() if n.op == "placeholder"]
    by_line: dict[str, dict[str, None]] = {}
    for node, each in held.items():
        if node.op != "placeholder":
            by_line.setdefault(each.line, {})[_fact(node, each.value)] = None
    said = []
    if arguments:
        said.append(f"arguments are held, and checked at each call: {', '.join(arguments)}")
    if by_line:
        answers = [f"{_some(facts)}{_at(line)}" for line, facts in by_line.items()]
        more = f"; and {len(answers) - _SHOWN} more" if len(answers) > _SHOWN else ""
        listed = "; ".join(answers[:_SHOWN]) + more
        said.append(f"what forward asks of sizes is held, and checked at each call: {listed}")
    return tuple(said)


def _some(facts: Collection[str]) -> str:
    more = ", …" if len(facts) > _OF_A_LINE else ""
    return ", ".join(list(facts)[:_OF_A_LINE]) + more


def _fact(node: fx.Node, value: Any) -> str:
    text = text_of(node)
    if value is None or (isinstance(value, bool) and node.op == "placeholder"):
        return f"{text} is {value}"
    if isinstance(value, bool):
        return text if value else f"not ({text})"
    return f"{text} == {value!r}"


def _at(line: str) -> str:
    """Without the folders, and the end of a long line."""
    path, _, rest = line.partition(":")
    text = f"{Path(path).name}:{rest}"
    if not line:
        return ""
    return f" ({text})" if len(text) <= _LONGEST else f" ({text[:_LONGEST]}…)"


def text_of(node: object, depth: int = 5) -> str:
    """What is asked of a tensor, as the expression that it is; tensors by their names.

    >>> graph = fx.Graph()
    >>> shape = graph.call_function(getattr, (graph.placeholder("x"), "shape"))
    >>> last = graph.call_function(operator.getitem, (shape, -1))
    >>> text_of(graph.call_function(operator.ne, (last, 3)))
    'x.shape[-1] != 3'
    """
    if not isinstance(node, fx.Node):
        return repr(node)
    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    return (_expression(node, depth) if depth and not node.kwargs else None) or str(node.name)


def _expression(node: fx.Node, depth: int) -> str | None:
    """What ``node`` asks of a tensor; ``None``: it may be a tensor itself, as far as the graph shows."""
    args = [text_of(each, depth - 1) for each in node.args]
    if node.op == "call_method" and node.target in _METHODS:
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    if node.target is getattr:
        return f"{args[0]}.{node.args[1]}"
    if node.target is len:
        return f"len({args[0]})"
    numbers = node.args[:1] if node.target is operator.getitem else node.args
    if not all(_is_number(each, depth - 1) for each in numbers):
        return None
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    target: Any = node.target
    return f"{args[0]} {_SIGNS[target]} {args[1]}" if target in _SIGNS else None


def _is_number(value: object, depth: int) -> bool:
    if not isinstance(value, fx.Node):
        return True
    is_call = value.op.startswith("call_")
    return is_call and depth > 0 and _expression(value, depth) is not None


_TRACERS = tuple(folder(Path(place).parent) for place in (__file__, fx.__file__))

# Packages whose modules are operators of their own. ``backquant.nn`` itself holds stubs, which
# are traced through.
_LEAF_PACKAGES = (
    *("torch.nn.", "torch.ao.nn.", "backquant.nn.intrinsic.", "backquant.nn.qat."),
    *("backquant.nn.quantized.", "backquant.nn.quantizable.", "backquant.observe."),
)

# Functions that read values: the tracer records calls of them and does not trace through.
_PACKING = (rnn.pack_padded_sequence, rnn.pad_packed_sequence, rnn.pack_sequence, rnn.pad_sequence)

# Base classes of fused modules (ours and PyTorch's): Sequential subclasses that are leaves.
_FUSED_BASES = frozenset({"FusedModule", "_FusedModule"})


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is one operator of the graph instead of being traced through.

    Modules of ``torch.nn`` except sequential containers, fused modules, the modules of
    ``backquant.nn``, observers and TorchScript modules are.

    >>> is_leaf(nn.Conv2d(1, 1, 1)), is_leaf(nn.Sequential(nn.ReLU()))
    (True, False)
    """
    kind = type(module)
    if not _FUSED_BASES.isdisjoint([base.__name__ for base in kind.__mro__]):
        return True
    if issubclass(kind, nn.Sequential):
        return False
    if issubclass(kind, (torch.jit.ScriptModule, ByMode)):
        return True
    if has_own_methods(module):
        return False
    is_operator = f"{kind.__module__}.".startswith(_LEAF_PACKAGES)
    return is_operator or callable(getattr(module, "calculate_qparams", None))


def _changes(node: fx.Node) -> bool:
    """Whether the call is one of a method that changes a tensor in place."""
    name = str(node.target)
    return node.op == "call_method" and name.endswith("_") and not name.endswith("__")


def _own_form(root: Any) -> Callable[..., Any] | None:
    """What is traced in the place of the ``forward`` of ``root``: with its hooks, and without decorators that
    hide its arguments."""
    if not isinstance(root, nn.Module):
        return None
    plain = type(root).forward
    hooked = functools.wraps(plain)(with_hooks(type(root))) if has_hooks(root) else None
    return as_declared(hooked or plain) or hooked


@contextmanager
def _forward_of(root: Any, form: Callable[..., Any] | None) -> Iterator[None]:
    """``form`` in the place of the ``forward`` of ``root``, which a trace looks up in its class."""
    if form is None:
        yield
        return
    kind = type(root)
    own = {"forward": form, "stands_for": kind}
    root.__class__ = type(kind.__name__, (kind,), {**own, "__module__": kind.__module__})
    try:
        yield
    finally:
        root.__class__ = kind


class ModuleTracer(fx.Tracer):
    """Traces a module tree; records the scope of each node, as PyTorch's quantization tracer, and as
    its ``stack_trace`` the calls of ``forward`` that lead to it.

    ``recorded``: functions whose calls with values of the trace are recorded, though torch runs them.

    ``forms``: by path, what is traced in the place of a module's ``forward``; such a module is no leaf. What
    is computed there, or by hooks, and read nowhere is dropped.

    Hooks are traced as what they do (``backquant.graph.hooks``); the root and its modules are copies.

    After a trace ``returned`` is what the model returned, with proxies for tensors, ``changed`` has the calls
    that stand for ``+=`` and its like, ``hooked`` the leaves whose hooks are nodes now, ``held`` what the
    trace took for granted, ``unchecked`` the lines of asserts that it let pass, and ``assigned`` the
    attributes to which ``forward`` assigned values of it.
    After a failure ``failed_path`` is the path of the innermost module whose ``forward`` raised.
    """

    def __init__(
        self,
        non_traceable_names: Collection[str] = (),
        non_traceable_classes: Collection[type] = (),
        forms: Mapping[str, Callable[..., Any]] | None = None,
        recorded: tuple[Callable[..., Any], ...] = (),
    ) -> None:
        super().__init__(autowrap_functions=(*_PACKING, *recorded))
        # so that calls as nn.utils.rnn.pack_padded_sequence(...) are found
        self._autowrap_search.append(rnn)
        self.scope = FxScope("", None)
        self.failed_path: str | None = None
        self._failure: Exception | None = None
        self.returned: Any = None
        self.changed: set[fx.Node] = set()
        self._nested = 0
        self._names = frozenset(non_traceable_names)
        self._classes = frozenset(non_traceable_classes)
        self._forms = {} if forms is None else forms
        self._forms_open = 0
        self._by_forms: set[fx.Node] = set()
        self._names_of: dict[int, str] = {}  # of parameters and buffers, by identity
        self._transparent: frozenset[int] = frozenset()
        self._registered: frozenset[int] | None = None  # the modules of the root, by identity
        self._recorded = frozenset((*_PACKING, *recorded))
        self.held: dict[fx.Node, Held] = {}
        self.unchecked: dict[str, None] = {}
        self.assigned: tuple[str, ...] = ()
        self.hooked: list[nn.Module] = []
        self._hooked: frozenset[int] = frozenset()  # leaves, by identity

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> fx.Graph:
        if isinstance(root, nn.Module):
            # held until the end, so that no other tensor gets their identity
            held = _tensors_by_name(root)
            self._names_of = {id(tensor): name for name, tensor in reversed(held)}
            self._transparent = _transparent_modules(root)
            self._registered = frozenset(map(id, root.modules()))
            hooked = [part for part in root.modules() if part is not root and has_hooks(part)]
            self._hooked = frozenset(id(part) for part in hooked if is_leaf(part))
        with _forward_of(root, self._form_of(root)):
            graph = super().trace(root, concrete_args)
        self._drop_unread(graph)
        for node in graph.nodes:
            if (
                node.target in self._recorded
            ):  # else generated code would call fx.wrap for them, with a dotted name
                node.meta.pop("is_wrapped", None)
        dataclasses_as_dicts(graph)
        # The tracer is part of a reference cycle: do not keep the modules alive with it.
        self.root, self.submodule_paths, self.tensor_attrs = nn.Module(), {}, {}
        return graph

    def _form_of(self, root: Any) -> Callable[..., Any] | None:
        given = self._forms.get("")
        return _own_form(root) if given is None else functools.wraps(type(root).forward)(given)

    def wiser(self) -> ModuleTracer | None:
        """After a failure: a tracer that may succeed where this one did not."""
        return None

    def _drop_unread(self, graph: fx.Graph) -> None:
        """Erase what forms compute for nobody, the last first."""
        for node in reversed(list(graph.nodes)):
            kept = node.op == "call_module" or node.target is torch._assert or _changes(node)
            if node in self._by_forms and not node.users and not kept:
                graph.erase_node(node)
                self.node_name_to_scope.pop(node.name, None)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Changeable(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if node.op.startswith("call_"):
            node.stack_trace = _forward_calls(sys._getframe(1)) or None
        if self._forms_open:
            self._by_forms.add(node)
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._forms:
            return False
        if id(m) in self._hooked:
            return False
        return module_qualified_name in self._names or type(m) in self._classes or is_leaf(m)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if id(m) in self._transparent:
            return args[0]
        if self._is_made_in_forward(m):
            return forward(*args, **kwargs)
        path = self._path_or_empty(m) if self._forms else ""
        form = self._forms.get(path)
        open_calls = len(self.module_stack)
        try:
            if id(m) in self._hooked:
                return self._call_hooked(m, forward, args, kwargs)
            if form is None:
                return super().call_module(m, forward, args, kwargs)
            return self._call_form(m, form, args, kwargs)
        except Exception as error:
            if error is not self._failure:  # the innermost; a model may have caught the one before
                self._failure, self.failed_path = error, self._path_or_empty(m)
            while len(self.module_stack) > open_calls:  # what torch leaves where a model goes on
                self.module_stack.popitem()
            raise

    def _is_made_in_forward(self, m: nn.Module) -> bool:
        """Whether ``m`` is none of the root's modules, and holds no tensors itself (``nn.ReLU()(x)``, or
        ``nn.Sequential(*layers)(x)`` of layers that are the root's): what it computes is traced."""
        if self._registered is None or id(m) in self._registered:
            return False
        return all(own is None for own in (*m._parameters.values(), *m._buffers.values()))

    def _call_hooked(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call of a leaf, between the nodes of what its hooks do."""
        target = self.path_of_module(m)
        self.hooked.append(m)

        def called(*args: Any, **kwargs: Any) -> Any:
            return self.create_proxy("call_module", target, args, kwargs)

        self._forms_open += 1
        try:
            with only_users_hooks(m), forward_in_place(m, called):
                return super().call_module(m, forward, args, kwargs)
        finally:
            self._forms_open -= 1

    def _call_form(
        self,
        m: nn.Module,
        form: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._forms_open += 1
        try:
            return super().call_module(m, partial(form, m), args, kwargs)
        finally:
            self._forms_open -= 1

    def create_arg(self, a: Any) -> Any:
        # The base class searches all parameters, or all buffers, for each use of one.
        if isinstance(a, torch.Tensor) and id(a) in self._names_of:
            return self.create_node("get_attr", self._names_of[id(a)], (), {})
        if isinstance(a, np.generic):
            a = a.item()  # the graph's code does not import numpy
        if not self._nested:
            self.returned = a  # the last call of create_arg is for the output node
        self._nested += 1
        try:
            return super().create_arg(a)
        finally:
            self._nested -= 1

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, nn.Parameter) and not self.param_shapes_constant:
            name = self._names_of.get(id(attr_val))
            if name is None:
                return attr_val
            if name not in parameter_proxy_cache:
                parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
            return parameter_proxy_cache[name]
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def _path_or_empty(self, module: nn.Module) -> str:
        try:
            return self.path_of_module(module)
        except NameError:
            return ""


def _tensors_by_name(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = root.named_parameters(remove_duplicate=False)
    return [*parameters, *root.named_buffers(remove_duplicate=False)]


def _transparent_modules(root: nn.Module) -> frozenset[int]:
    """Observer placeholders inside ``FloatFunctional``: in a graph they stand for nothing."""
    return frozenset(
        id(module.activation_post_process)
        for module in root.modules()
        if type(module).__name__ == "FloatFunctional"
        and isinstance(getattr(module, "activation_post_process", None), nn.Identity)
    )


def _forward_calls(frame: FrameType | None) -> str:
    """The calls of ``forward`` up to ``frame``, outermost first, as a traceback shows them."""
    found = []
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and not code.co_filename.startswith(_TRACERS):
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            place = f'  File "{code.co_filename}", line {frame.f_lineno}, in forward'
            found.append(f"{place}\n    {line}")
        frame = frame.f_back
    return "\n".join(reversed(found))


# Decorated ``forward`` methods, as a trace can call them.
#
# ``torch.fx`` reads the arguments of the function within (``__wrapped__``), and calls the decorator with them
# by position. Where the function takes ``*args``, ``**kwargs`` or arguments by keyword, it rewrites the
# code of what it calls for that: of a decorator's ``wrapper(self, *args, **kwargs)`` it makes another
# function (models of transformers: "'NoneType' object has no attribute 'get'"; torch 2.13).
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def as_declared(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """``forward`` as a function with the arguments that it names; others, of ``*args`` and ``**kwargs``, are
    none. Those with defaults are handed on by keyword, as decorators expect that add to ``kwargs`` what is
    left out. ``None`` where it can be traced as it is.

    >>> import functools
    >>> def plain(self, x, *, y=2, **more):
    ...     return x + y
    >>> @functools.wraps(plain)
    ... def decorated(self, *args, **kwargs):
    ...     return plain(self, *args, **kwargs)
    >>> as_declared(plain) is None
    True
    >>> made = as_declared(decorated)
    >>> inspect.signature(made), made(None, 1)
    (<Signature (self, x, *, y=2)>, 3)
    """
    inner = inspect.unwrap(forward)
    given = list(inspect.signature(inner).parameters.values())
    named = [each for each in given if each.kind in _BY_POSITION]
    keywords = [each.name for each in given if each.kind is inspect.Parameter.KEYWORD_ONLY]
    if inner is forward or len(named) == len(given):
        return None
    head = ", ".join([*(each.name for each in named), *(["*", *keywords] if keywords else [])])
    first = [each.name for each in named if _is_by_position(each)]
    later = [each.name for each in named if not _is_by_position(each)]
    call = ", ".join([*first, *(f"{name}={name}" for name in (*later, *keywords))])
    source = (
        f"def made(_called):\n def forward({head}):\n  return _called({call})\n return forward\n"
    )
    found: dict[str, Any] = {}
    # its globals are where a trace looks for functions to record
    exec(source, inner.__globals__, found)
    made: FunctionType = found["made"](forward)
    made.__defaults__ = inner.__defaults__
    made.__kwdefaults__ = inner.__kwdefaults__
    made.__doc__, made.__qualname__ = inner.__doc__, inner.__qualname__
    return made


def _is_by_position(parameter: inspect.Parameter) -> bool:
    no_name = parameter.kind is inspect.Parameter.POSITIONAL_ONLY
    return no_name or parameter.default is inspect.Parameter.empty
