"""Traces that know the example inputs: what ``forward`` asks of sizes and of flags is answered by them."""

from __future__ import annotations

import enum
import inspect
import linecache
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType, MethodType
from typing import Any, cast

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from backquant.graph.example import as_arguments
from backquant.graph.fixed_data import asserted
from backquant.graph.grouped import product_shape
from backquant.graph.in_place import Changeable, put
from backquant.graph.interception import frame_line
from backquant.graph.objects import field_index
from backquant.graph.tracer import Held, ModuleTracer

# What the nodes of a trace are on the example inputs: tensors without their values.


# Of a tensor: what depends on how it was made, not on its size and dtype.
_OF_GRADIENTS = frozenset({"requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad"})


class Unknown:
    """What cannot be told: a number that depends on the values of tensors, or the result of code that fails
    on tensors without values."""


UNKNOWN = Unknown()


class ExampleValues:
    """Values by node.

    A tensor is one without values (``FakeTensorMode``), so that nothing is computed and nobody can decide by
    its numbers.

    >>> values = ExampleValues()
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> values.give(x, torch.ones(2, 3))
    >>> values.run(graph.call_method("flatten", (x,)), "flatten").shape
    torch.Size([6])
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        """The value of ``node``, or ``UNKNOWN``."""
        return self._known.get(node, UNKNOWN)

    def give(self, node: fx.Node, value: Any) -> None:
        """``value``, of the example inputs or of the model, is that of ``node``."""
        try:
            self._known[node] = pytree.tree_map_only(torch.Tensor, self._stand_in, value)
        except Exception:  # tensors of other layouts, and what no stand-in is known for
            self._known[node] = UNKNOWN

    def run(self, node: fx.Node, call: Callable[..., Any] | str) -> Any:
        """The value of ``node``, a call of the function or the method ``call``, which is noted.

        Raises what a call raises that has no tensor among its arguments.
        """
        known = all(self.of(each) is not UNKNOWN for each in node.all_input_nodes)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.of)
        self._known[node] = UNKNOWN
        if known:
            self._known[node] = self.called(call, args, kwargs)
        return self._known[node]

    def called(
        self, call: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What ``call`` gives for arguments that are values."""
        if call is getattr and isinstance(args[0], torch.Tensor) and args[1] in _OF_GRADIENTS:
            return UNKNOWN
        try:
            with self._mode, torch.no_grad():
                if isinstance(call, str):
                    return getattr(args[0], call)(*args[1:], **kwargs)
                made = product_shape(call, args, kwargs)
                return call(*args, **kwargs) if made is None else made
        except Exception:
            leaves = (call, *pytree.tree_leaves((args, kwargs)))
            if any(isinstance(leaf, (torch.Tensor, nn.Module, MethodType)) for leaf in leaves):
                return UNKNOWN
            raise

    def try_on_tensors(self, node: fx.Node, call: Callable[..., Any]) -> None:
        """The value of ``node``, a call of a module that asks for the values of tensors: what it gives for
        zeros and for ones, if these are of the same form."""
        if any(self.of(each) is UNKNOWN for each in node.all_input_nodes):
            return
        given = fx.node.map_arg((node.args, node.kwargs), self.of)
        made = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for filled in (torch.zeros, torch.ones):
                args, kwargs = pytree.tree_map_only(torch.Tensor, _filled_with(filled), given)
                try:
                    made.append(call(*args, **kwargs))
                except Exception:  # code of the user
                    return
        forms = [pytree.tree_map_only(torch.Tensor, _form, each) for each in made]
        if forms[0] == forms[1]:
            self.give(node, made[0])

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._mode.from_tensor(tensor, static_shapes=True)


def _filled_with(fill: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: fill(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


# A tracer that knows the example inputs: its values answer what Python asks of them, as those would.


# They take sizes and give tensors: with a size of the trace among their arguments they are recorded.
_MAKERS = (
    *(torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.linspace),
    *(torch.tensor, torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
    *(torch.finfo, torch.iinfo, torch.tril_indices, torch.triu_indices, torch.hann_window),
    *(torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.logspace),
)
_INFO = (torch.finfo, torch.iinfo)
_RANKS = frozenset({"dim", "ndimension"})
_VIEWS_OF_DICTS = frozenset({"keys", "values", "items"})
_HELD_WHOLE = (bool, str, bytes, type(None), enum.Enum)
_MOST = 100  # values that are asked for by their hash
_OF_AUTOGRAD = tuple(str(Path(torch.__file__).parent / name) for name in ("autograd", "_functorch"))

# In the code, or on the line, that asks for the class of a value.
_OF_CLASSES = ("isinstance", "issubclass", "__class__")


class ExampleProxy(Changeable):
    """A value that is recorded, and known on the example inputs, where it can be.

    1. ``isinstance`` in Python sees the class of the value. Torch's functions in C do not: they would read
       memory of a tensor that is not there (``torch.as_tensor(x)``).
    2. What must be a number, a truth or a length to Python is that of the example; the tracer notes it, and
       the graph checks it at each call.
    3. What is computed from sizes stays computed.
    4. ``callable`` is true of it, as of all values of a trace: a tensor that is called is itself
       (``x() if callable(x) else x``).
    """

    tracer: ExampleTracer

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # rule 1
        value = self._value()
        if value is UNKNOWN or not _asks_for_class(sys._getframe(1)):
            return type(self)
        return torch.Tensor if isinstance(value, torch.Tensor) else type(value)

    def _value(self) -> Any:
        return self.tracer.values.of(self.node)

    def _known(self) -> Any:
        """The value, which must not be one that tensors decide."""
        value = self._value()
        if value is UNKNOWN:
            self.tracer.to_bool(self)  # raises
        return value

    def _number(self) -> Any:
        value = self._known()
        if not isinstance(value, (bool, int, float)):
            return self.tracer.to_bool(self)
        return self.tracer.hold(self.node, value)

    def __getattr__(self, name: str) -> Any:
        return self.tracer.attribute(self, name)

    def __bool__(self) -> bool:
        asking, value = sys._getframe(1), self._value()
        passes = asserted(asking)
        if passes is not None and (value is UNKNOWN or isinstance(value, torch.Tensor)):
            self.tracer.unchecked[frame_line(asking)] = None
            return passes
        value = self._known()
        if isinstance(value, torch.Tensor):
            return bool(self.tracer.to_bool(self))
        if isinstance(value, bool):
            return bool(self.tracer.hold(self.node, value))
        if isinstance(value, (int, float)):
            return bool(self.tracer.create_proxy("call_function", operator.truth, (self,), {}))
        if isinstance(value, (tuple, list, dict)):
            return len(self) > 0
        return bool(value)

    def __len__(self) -> int:
        value = self._known()
        if isinstance(value, torch.Size):
            source = self.tracer.tensor_of_shape(self)
            if source is not None:
                return self.tracer.rank(*source)
        count = len(value)
        if isinstance(value, (torch.Tensor, torch.Size)) or _is_argument(self):
            self.tracer.hold(self.tracer.noted(len, self), count)
        return count

    def __iter__(self) -> Iterator[Any]:
        value = self._known()
        if isinstance(value, dict):
            if _is_argument(self):
                len(self)
            return iter(list(value))
        if not isinstance(value, (torch.Tensor, tuple, list)):
            return self.tracer.iter(self)
        this: Any = self
        return (this[index] for index in range(len(self)))

    def keys(self) -> Any:
        return self.tracer.called_method(self, "keys", (), {})

    def __contains__(self, item: Any) -> bool:
        value = self._known()
        if isinstance(value, dict):
            return item in value
        return any(each is item or each == item for each in self)

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._number(), digits)

    def __index__(self) -> int:
        return self.tracer.index(self, _position(sys._getframe(1)))

    def __hash__(self) -> int:
        value = self._value()
        if value is UNKNOWN or isinstance(value, torch.Tensor):
            return id(self)
        is_read = isinstance(self, ExampleAttribute)
        self.tracer.wanted.add(_key(self.root, self.attr) if is_read else self.node.name)
        raise TypeError(f"unhashable type: {type(value).__name__!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._value(), torch.Tensor):  # rule 4
            return self
        return super().__call__(*args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        x: Any = self  # to PyTorch's functions a tensor
        places = torch.arange(x.numel(), device=x.device).reshape(x.shape)[index]
        if isinstance(value, (bool, int, float)):
            given = torch.full_like(places, value, dtype=x.dtype)
        else:
            given = value.to(x.dtype).expand_as(places)
        made = self.tracer.create_proxy("call_function", put, (self, places, given), {})
        self.tracer.changed.add(made.node)

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None
    ) -> Any:
        """Torch's functions ask for ``__index__`` before they find that an argument is recorded."""
        given = (*(args or ()), *(kwargs or {}).values())
        for tracer in {each.tracer for each in proxies_in(given)}:
            tracer.not_indexed(_position(sys._getframe(1)))
        return super().__torch_function__(orig_method, types, args, kwargs)


class ExampleAttribute(ExampleProxy):
    """An attribute that is not read yet: mostly it is a method, and called."""

    def __init__(self, root: ExampleProxy, name: str, value: Any) -> None:
        self.root = root
        self.attr = name
        self.tracer = root.tracer
        self._found = value
        self._node: fx.Node | None = None

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        if self._node is None:
            self._node = self.tracer.read(self.root, self.attr)
        return self._node

    def _value(self) -> Any:
        return self._found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._found, torch.Tensor):  # rule 4
            return self
        return self.tracer.called_method(self.root, self.attr, args, kwargs)


def _asks_for_class(frame: FrameType) -> bool:
    """Whether the Python code at ``frame`` itself asks for a class, as far as its line shows; code without
    lines (type checks that a decorator wrote) does where it may; autograd's passes values on to C."""
    if frame.f_code.co_filename.startswith(_OF_AUTOGRAD):
        return False
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if not line:
        return any(word in frame.f_code.co_names for word in _OF_CLASSES)
    return any(word in line for word in (*_OF_CLASSES, "case "))


def _position(frame: FrameType) -> tuple[FrameType, int]:
    """Which call a frame is at."""
    return frame, frame.f_lasti


def proxies_in(values: Any) -> list[ExampleProxy]:
    """The values of a trace in containers."""
    found: list[ExampleProxy] = []

    def note(value: Any) -> Any:
        if issubclass(type(value), ExampleProxy):
            found.append(value)
        return value

    fx.node.map_aggregate(values, note)
    return found


class ExampleTracer(ModuleTracer):
    """Traces with example inputs: ``forward`` may ask for sizes, lengths, ranks and flags.

    1. Arguments that are flags (truths, text, ``None``) are those of the example inputs, or their defaults.
    2. What else Python must know is held: ``held`` has the nodes and their values, for the caller to check.
    3. What depends on the values of tensors is as unknown as in any trace; what an ``assert`` says of them
       passes, and its line is in ``unchecked``.

    ``wanted``: after a failure, values that a dict or a cache would have had to know by their hash; texts.
    ``as_they_are``: of a trace before, which gave them by ``wanted``: they are held, and no values of the
    trace.
    """

    def __init__(
        self,
        example_inputs: Any,
        non_traceable_names: Collection[str] = (),
        non_traceable_classes: Collection[type] = (),
        forms: Mapping[str, Callable[..., Any]] | None = None,
        as_they_are: Collection[str] = (),
    ) -> None:
        super().__init__(non_traceable_names, non_traceable_classes, forms, recorded=_MAKERS)
        self._autowrap_search.append(torch)
        self.values = ExampleValues()
        self.held: dict[fx.Node, Held] = {}
        self.wanted: set[str] = set()
        self._as_they_are = frozenset(as_they_are)
        self._example = example_inputs
        self._given: dict[str, Any] = {}
        self._ranks: dict[fx.Node, int] = {}
        self._indexed: dict[tuple[FrameType, int], list[fx.Node]] = {}
        self._is_running = False  # a module, for what it gives, and not to be recorded

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> fx.Graph:
        if isinstance(root, nn.Module):
            self._given = _given(root, self._example)
        try:
            graph = super().trace(root, concrete_args)
        finally:
            self._indexed.clear()
            self._given = {}
            self.values = ExampleValues()  # from here on nothing is known
        for node in reversed(list(graph.nodes)):
            if node.target in _INFO and not node.users:
                graph.erase_node(node)
        nodes = set(graph.nodes)
        self.held = {node: each for node, each in self.held.items() if node in nodes}
        return graph

    def wiser(self) -> ExampleTracer | None:
        held = self._as_they_are | self.wanted
        if held == self._as_they_are or len(held) > _MOST:
            return None
        return ExampleTracer(self._example, self._names, self._classes, self._forms, held)

    # what is recorded

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ExampleProxy(node, self)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *rest: Any,
        **more: Any,
    ) -> Any:
        made = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        node = made.node
        if kind == "placeholder":
            return self._argument(made)
        if kind != "get_attr":
            self._run(node, kind, target)
        if node.name in self._as_they_are and id(target) not in self._autowrap_function_ids:
            return self.hold(node, self.values.of(node))
        return made

    def _run(self, node: fx.Node, kind: str, target: Any) -> None:
        if kind != "call_module":
            self.values.run(node, target)
            return
        module = self.root.get_submodule(target)
        modes = {part: part.training for part in module.modules()}
        self._is_running = True
        try:
            for mode in (None, False):  # a batch of one is an error to batch norms in training
                if mode is not None:
                    module.train(mode)
                forward = type(module).forward if id(module) in self._hooked else None
                call = module if forward is None else forward.__get__(module)
                if self.values.run(node, call) is not UNKNOWN:
                    return
            self.values.try_on_tensors(node, call)
        finally:
            self._is_running = False
            for part, mode in modes.items():
                part.training = mode

    def create_arg(self, a: Any) -> Any:
        if not issubclass(type(a), fx.Proxy):
            return super().create_arg(a)
        if not self._nested:
            self.returned = a
        return a.node

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if node.op == "get_attr":
            self.values.give(node, self._attribute(str(node.target)))
        return node

    def _attribute(self, target: str) -> Any:
        """A tensor of the model."""
        path, _, name = target.rpartition(".")
        self._is_running = True
        try:
            return getattr(self.root.get_submodule(path), name)
        finally:
            self._is_running = False

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._is_running:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._is_running:
            return attr_val
        name = self._names_of.get(id(attr_val))
        is_buffer = isinstance(attr_val, torch.Tensor) and not isinstance(attr_val, nn.Parameter)
        if not is_buffer or name is None or attr_val.numel() <= 1:  # one number may decide
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    # what Python asks of it

    def attribute(self, proxy: ExampleProxy, name: str) -> Any:
        """``proxy.name``, which is not recorded before it is used."""
        value = proxy._value()
        if value is UNKNOWN:
            return ExampleAttribute(proxy, name, UNKNOWN)
        if isinstance(value, torch.Tensor):
            if name == "ndim":
                return self.rank(proxy.node, value)
            if name.startswith("_") and not name.endswith(
                "__"
            ):  # of what Python has the trace has none
                raise AttributeError(name)
        if isinstance(value, _INFO):
            for node in proxy.node.all_input_nodes:
                self.hold(node, self.values.of(node))
            return getattr(value, name)
        if not hasattr(torch.Tensor if isinstance(value, torch.Tensor) else value, name):
            raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")
        found = self.values.called(getattr, (value, name), {})
        made = ExampleAttribute(proxy, name, UNKNOWN if inspect.isroutine(found) else found)
        if _key(proxy, name) in self._as_they_are:
            return self.hold(made.node, found)
        if isinstance(
            found, str
        ):  # code in C takes no text of a trace (``autocast(x.device.type)``)
            self.wanted.add(_key(proxy, name))
        return made

    def read(self, root: ExampleProxy, name: str) -> fx.Node:
        """The node of an attribute; fields of a named tuple are read by their number, as a file may."""
        index = field_index(root._value(), name)
        if index is not None:
            made = self.noted(operator.getitem, root, index)
            self.values.run(made, operator.getitem)
            return made
        made = self.noted(getattr, root, name)
        self.values.run(made, getattr)
        return made

    def noted(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """A call that is recorded as in any trace."""
        made: fx.Node = super().create_proxy("call_function", target, args, {}).node
        return made

    def called_method(
        self, root: ExampleProxy, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        value = root._value()
        if isinstance(value, torch.Tensor) and name in _RANKS:
            return self.rank(root.node, value)
        if isinstance(value, dict) and name in _VIEWS_OF_DICTS:
            keys, held = [*root], cast(Any, root)
            values = keys if name == "keys" else [held[key] for key in keys]
            return list(zip(keys, values, strict=True)) if name == "items" else values
        return self.create_proxy("call_method", name, (root, *args), kwargs)

    def index(self, proxy: ExampleProxy, position: tuple[FrameType, int]) -> int:
        """A size as an index; held unless the call at ``position`` turns out to be recorded."""
        value = proxy._known()
        if not isinstance(value, (bool, int)):
            raise TypeError(f"{type(value).__name__!r} object cannot be interpreted as an integer")
        if proxy.node not in self.held:
            self.hold(proxy.node, value)
            self._indexed.setdefault(position, []).append(proxy.node)
        return int(value)

    def not_indexed(self, position: tuple[FrameType, int]) -> None:
        for node in self._indexed.pop(position, ()):
            self.held.pop(node, None)

    # what is held

    def hold(self, node: fx.Node, value: Any) -> Any:
        if node not in self.held:
            self.held[node] = Held(value, frame_line(sys._getframe(1)))
        return value

    def rank(self, node: fx.Node, value: torch.Tensor) -> int:
        if node not in self._ranks:
            self._ranks[node] = value.dim()
            read = self.create_node("call_method", "dim", (node,), {})
            self.hold(read, value.dim())
        return value.dim()

    def tensor_of_shape(self, proxy: ExampleProxy) -> tuple[fx.Node, torch.Tensor] | None:
        """The tensor whose shape ``proxy`` is."""
        if isinstance(proxy, ExampleAttribute):
            node, is_shape = proxy.root.node, proxy.attr == "shape"
        elif proxy.node.op == "call_method" and proxy.node.target == "size":
            node, is_shape = proxy.node.all_input_nodes[0], len(proxy.node.args) == 1
        else:
            return None
        value = self.values.of(node)
        return (node, value) if is_shape and isinstance(value, torch.Tensor) else None

    def _argument(self, proxy: Any) -> Any:
        """Rule 1."""
        name = str(proxy.node.target)
        value = self._given.get(name, UNKNOWN)
        if isinstance(value, _HELD_WHOLE):
            self.held[proxy.node] = Held(value, "")
            return value
        self.values.give(proxy.node, value)
        return proxy


def _key(root: fx.Proxy, name: str) -> str:
    return f"{root.node.name}.{name}"


def _is_argument(proxy: fx.Proxy) -> bool:
    return proxy.node.op == "placeholder"


def _given(root: nn.Module, example_inputs: Any) -> dict[str, Any]:
    """The arguments of ``forward`` as a trace names them, those that are left out with their defaults."""
    args, kwargs = as_arguments(example_inputs)
    signature = inspect.signature(root.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    kinds = {name: each.kind for name, each in signature.parameters.items()}
    return {_stars(kinds[name]) + name: value for name, value in bound.arguments.items()}


def _stars(kind: Any) -> str:
    if kind is inspect.Parameter.VAR_POSITIONAL:
        return "*"
    return "**" if kind is inspect.Parameter.VAR_KEYWORD else ""
