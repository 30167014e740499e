"""Modules as data: class path, plain attributes, parameters and buffers; and back without ``__init__``.

1. A module with ``artifact_config()`` / ``from_artifact(config, tensors)`` says itself what it needs
   (kernel modules: their packed weights are rebuilt).
2. A ``torch.fx.GraphModule`` is written as its graph, its children and its preserved attributes.
3. Any other module of an admitted package is written attribute by attribute.
4. A module of another class (the user's own leaf), or with hooks on its calls, is refused by name.
5. A module that stands in several places is written once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from backquant.artifact import labels
from backquant.artifact.functions import function_path, is_within
from backquant.artifact.graph import check_targets, decode_graph, encode_graph
from backquant.artifact.growth import check_growth
from backquant.artifact.json_values import Decoder, Encoder
from backquant.artifact.kernels import check_config, check_tensors
from backquant.artifact.labels import (
    check_keyword,
    check_path,
    class_path,
    find_module_class,
    renamed,
    storable_path,
)
from backquant.errors import ArtifactError
from backquant.graph import DeferredGraphModule, copied_graph, inline_call
from backquant.graph.hooks import has_own_methods, removal_of
from backquant.lower.kernels.configured import KernelModule, decode_config

# What a file may say about modules of ``torch.nn``: no attribute hides a method, and weights fit.
#
# Modules come back without their ``__init__``, which is where torch checks them. Most operators check their
# arguments when they are called; recurrent layers and attention do not, so their weights are checked here.

_TABLES = ("attributes", "parameters", "buffers", "children")
_GATES = {"LSTM": 4, "GRU": 3, "LSTMCell": 4, "GRUCell": 3}
_MOST = 1 << 31


def check_attribute_names(
    cls: type, entry: Mapping[str, Any], internal: Collection[str], where: str
) -> None:
    """No name of a stored attribute, tensor or child is one that the class itself uses.

    >>> check_attribute_names(nn.ReLU, {"attributes": {"inplace": False}}, (), "act")
    >>> check_attribute_names(nn.ReLU, {"attributes": {"forward": 1}}, (), "act")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: 'forward' is no attribute of a module
      where  act
    """
    for table in _TABLES:
        for name in entry.get(table, {}):
            if hides_of_class(cls, name) or name in internal or name.startswith("__"):
                raise ArtifactError(f"{name!r} is no attribute of a module", where=where)


def hides_of_class(cls: type, name: str) -> bool:
    """Whether an attribute ``name`` would hide a method or a property of ``cls``.

    >>> hides_of_class(nn.ReLU, "forward"), hides_of_class(nn.ReLU, "inplace")
    (True, False)
    """
    found = getattr(cls, name, None)
    return callable(found) or isinstance(found, property)


def check_module(module: nn.Module, where: str) -> None:
    """Sizes and weights that kernels take as given. Raises ``ArtifactError``.

    >>> lstm = nn.LSTM(2, 3)
    >>> check_module(lstm, "lstm")
    >>> lstm.hidden_size = 5
    >>> check_module(lstm, "lstm")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: the weights of LSTM do not fit: weight_ih_l0 is [12, 2]
      where  lstm
    """
    weight = _shape(module, "weight")
    kernel = weight[2:] if weight is not None and "stride" in vars(module) else None
    check_growth(type(module).__name__, vars(module), kernel, where)
    wrong = ""
    if isinstance(module, nn.RNNBase):
        wrong = _recurrent(module)
    elif isinstance(module, (nn.LSTMCell, nn.GRUCell, nn.RNNCell)):
        wrong = _cell(module)
    elif isinstance(module, nn.MultiheadAttention):
        wrong = _attention(module)
    if wrong:
        raise ArtifactError(
            f"the weights of {type(module).__name__} do not fit: {wrong}", where=where
        )


def _shape(module: nn.Module, name: str) -> list[int] | None:
    tensor = module._parameters.get(name, module._buffers.get(name))
    return None if tensor is None else list(tensor.shape)


def _mismatch(module: nn.Module, shapes: Mapping[str, list[int]]) -> str:
    dtypes = set()
    for name, shape in shapes.items():
        found = _shape(module, name)
        if found != shape:
            return f"{name} is {found}"
        tensor = module._parameters.get(name, module._buffers.get(name))
        dtypes.add(None if tensor is None else tensor.dtype)
    ours = not type(module).__module__.startswith(
        "torch."
    )  # reference modules dequantize their weights
    return "" if ours or len(dtypes) < 2 else f"their dtypes are {sorted(map(str, dtypes))}"


def _are_positive(module: nn.Module, *names: str) -> bool:
    values = [module.__dict__.get(name) for name in names]
    return all(type(value) is int and 0 < value < _MOST for value in values)


def _gates(module: nn.Module) -> int:
    for cls in type(module).__mro__:
        if cls.__name__ in _GATES:
            return _GATES[cls.__name__]
    return 1


def _recurrent(module: nn.RNNBase) -> str:
    mode = {4: "LSTM", 3: "GRU"}.get(_gates(module), "RNN_")
    if not _are_positive(module, "input_size", "hidden_size", "num_layers"):
        return "input_size, hidden_size and num_layers"
    projected = module.__dict__.get("proj_size", 0)
    if type(projected) is not int or not 0 <= projected < module.hidden_size:
        return f"proj_size={projected!r}"
    if module.num_layers > 1024 or not str(module.__dict__.get("mode")).startswith(mode):
        return f"{module.num_layers} layers of mode {module.__dict__.get('mode')!r}"
    if any(
        type(module.__dict__.get(n)) is not bool for n in ("bias", "batch_first", "bidirectional")
    ):
        return "bias, batch_first and bidirectional"
    shapes, names = _layers(module, projected)
    if module.__dict__.get("_all_weights") != names:
        return f"names {module.__dict__.get('_all_weights')!r}"[:120]
    flat = [name for layer in names for name in layer]
    if module.__dict__.get("_flat_weights_names") != flat:
        return f"names {module.__dict__.get('_flat_weights_names')!r}"[:120]
    return _mismatch(module, shapes)


def _layers(module: nn.RNNBase, projected: int) -> tuple[dict[str, list[int]], list[list[str]]]:
    """Shapes of all weights by name, and the names of each layer."""
    rows, out = _gates(module) * module.hidden_size, projected or module.hidden_size
    directions = ("", "_reverse") if module.bidirectional else ("",)
    shapes: dict[str, list[int]] = {}
    names = []
    for layer in range(module.num_layers):
        for end in directions:
            columns = module.input_size if layer == 0 else out * len(directions)
            found = {
                f"weight_ih_l{layer}{end}": [rows, columns],
                f"weight_hh_l{layer}{end}": [rows, out],
            }
            if module.bias:
                found |= {f"bias_{side}_l{layer}{end}": [rows] for side in ("ih", "hh")}
            if projected:
                found[f"weight_hr_l{layer}{end}"] = [projected, module.hidden_size]
            shapes |= found
            names.append(list(found))
    return shapes, names


def _cell(module: nn.RNNCellBase) -> str:
    if not _are_positive(module, "input_size", "hidden_size"):
        return "input_size and hidden_size"
    rows = _gates(module) * module.hidden_size
    shapes = {"weight_ih": [rows, module.input_size], "weight_hh": [rows, module.hidden_size]}
    if _shape(module, "bias_ih") is not None or _shape(module, "bias_hh") is not None:
        shapes |= {"bias_ih": [rows], "bias_hh": [rows]}
    return _mismatch(module, shapes)


def _attention(module: nn.MultiheadAttention) -> str:
    if not _are_positive(module, "embed_dim", "num_heads", "head_dim"):
        return "embed_dim, num_heads and head_dim"
    width = module.embed_dim
    if module.head_dim * module.num_heads != width:
        return f"{module.num_heads} heads of {module.head_dim} in {width}"
    shapes = {}
    if _shape(module, "in_proj_weight") is not None:
        shapes["in_proj_weight"] = [3 * width, width]
    if _shape(module, "in_proj_bias") is not None:
        shapes["in_proj_bias"] = [3 * width]
    wrong = _mismatch(module, shapes)
    out = module._modules.get("out_proj")
    if wrong or not isinstance(out, nn.Linear):
        return wrong or "out_proj"
    shapes = {"weight": [width, width]}
    if _shape(out, "bias") is not None:
        shapes["bias"] = [width]
    return (
        _mismatch(out, shapes) if type(out._parameters.get("weight")) is torch.nn.Parameter else ""
    )


@runtime_checkable
class _Storable(Protocol):
    """A module that says itself what it needs."""

    def artifact_config(self) -> dict[str, Any]:
        """JSON-able configuration."""

    @classmethod
    def from_artifact(cls, config: dict[str, Any], tensors: dict[str, Any]) -> nn.Module:
        """The module again, from its configuration and its parameters and buffers by name."""


_INTERNAL = frozenset(nn.Module().__dict__)

# Hooks on calls; those on state_dicts compute nothing and are left out.
_HOOKS = tuple(n for n in _INTERNAL if n.endswith("_hooks") and "state_dict" not in n)
_REBUILT = frozenset({"_flat_weights", "_flat_weight_refs"})  # by nn.RNNBase


class ModuleEncoder:
    """Writes a module and its children; values go through ``encoder``."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._written: dict[int, str] = {}

    def encode(self, module: nn.Module, path: str = "") -> dict[str, Any]:
        """JSON form of ``module``; raises ``ArtifactError`` naming what cannot be stored.

        >>> ModuleEncoder(Encoder(lambda tensor: "t0")).encode(nn.ReLU())["attributes"]
        {'inplace': False}
        """
        if id(module) in self._written:
            return {"same_as": self._written[id(module)]}
        self._written[id(module)] = path
        where = path or "the model"
        entry: dict[str, Any] = {"training": module.training}
        if isinstance(module, torch.fx.GraphModule):
            graph = inlined(module.graph, self._encoder.allow)
            entry["graph"] = encode_graph(graph, self._encoder, path)
            preserved = module.meta.get(_USER_PRESERVED_ATTRIBUTES_KEY, {})
            entry["preserved"] = self._values(module, preserved, path)
        else:
            entry["class"] = storable_path(type(module), where, self._encoder.allow)
        entry |= self._tables(module, path)
        _refuse_hooks(module, where)
        if "class" in entry and isinstance(module, _Storable):
            entry["config"] = self._encoder.encode(module.artifact_config(), path)
            return entry
        if "class" in entry:
            _refuse_own_methods(module, where)
            own = {k: v for k, v in vars(module).items() if not _is_left_out(module, k, v)}
            entry["attributes"] = self._values(module, own, path)
        entry["children"] = {
            name: self.encode(child, _checked(f"{path}.{name}".lstrip("."), where))
            for name, child in module._modules.items()
            if child is not None
        }
        entry["absent"] = [name for name, child in module._modules.items() if child is None]
        return {key: value for key, value in entry.items() if value not in ({}, [])}

    def _values(self, module: nn.Module, values: Mapping[str, Any], path: str) -> dict[str, Any]:
        kind = type(module).__name__
        return {
            name: self._encoder.encode(value, f"{path}.{name} ({kind})".lstrip("."))
            for name, value in values.items()
        }

    def _tables(self, module: nn.Module, path: str) -> dict[str, Any]:
        parameters = module._parameters.items()
        buffers: Mapping[str, Any] = module._buffers
        if isinstance(module, KernelModule):
            buffers = module.stored_tensors()
        return {
            "parameters": self._values(module, dict(parameters), path),
            "frozen": [name for name, p in parameters if p is not None and not p.requires_grad],
            "buffers": self._values(module, buffers, path),
            "non_persistent": sorted(module._non_persistent_buffers_set),
        }


def _is_left_out(module: nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute is not written. Data that hides a method of its class is a note that a library
    made of a layer (``layer.type = "..."``): its operator does not read it, and no file may bring it."""
    is_note = hides_of_class(type(module), name) and not callable(value)
    return is_note or name in _INTERNAL | _REBUILT


def _refuse_own_methods(module: nn.Module, where: str) -> None:
    if has_own_methods(module):
        raise ArtifactError(
            f"methods were assigned to the {type(module).__name__}, and a file loads without your code",
            where=where,
            fix="write them as a class of their own, or keep the model in memory",
        )


def _refuse_hooks(module: nn.Module, where: str) -> None:
    for name in _HOOKS:
        hooks = getattr(module, name, None)
        if hooks:
            kind = name.strip("_").replace("_", " ").removesuffix("s")
            undo = removal_of(next(iter(hooks.values())))
            raise ArtifactError(
                f"the {type(module).__name__} has a {kind}, and hooks cannot be stored",
                where=where,
                fix=f"before quantizing: {undo}",
            )


class ModuleDecoder:
    """Reads what ``ModuleEncoder`` wrote. No ``__init__`` of a stored class runs but the kernels' own."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._read: dict[str, nn.Module] = {}

    def decode(self, entry: dict[str, Any], path: str = "") -> nn.Module:
        """The module that ``entry`` describes; raises ``ArtifactError`` for what is not admitted."""
        if "same_as" in entry:
            return self._same(entry["same_as"], path)
        is_kernel = "config" in entry
        module = self._from_config(entry, path) if is_kernel else self._from_parts(entry, path)
        self._read[path] = module
        return module

    def _same(self, known: str, path: str) -> nn.Module:
        if not isinstance(known, str) or known not in self._read:
            raise ArtifactError(f"there is no module {known!r} before this one", where=path)
        return self._read[known]

    def _from_config(self, entry: dict[str, Any], path: str) -> nn.Module:
        cls = find_module_class(entry["class"], self._decoder.allow)
        if not issubclass(cls, _Storable):
            raise ArtifactError(f"{class_path(cls)} is not built from a configuration")
        tables = (entry.get("parameters", {}), entry.get("buffers", {}))
        tensors = {name: self._decoder.decode(value) for t in tables for name, value in t.items()}
        config = self._decoder.decode(entry["config"])
        config_class = getattr(cls, "config_class", None)
        if config_class is not None:
            decoded = decode_config(config_class, config)
            check_config(cls, decoded, path)
            check_tensors(cls, decoded, tensors, path)
            weight = tensors.get("weight")
            kernel = None if weight is None or not hasattr(decoded, "stride") else weight.shape[2:]
            kind = getattr(decoded, "operator", cls.__name__)
            check_growth(kind, vars(decoded), kernel, path)
        elif not is_within(entry["class"], self._decoder.allow):
            raise ArtifactError(f"{entry['class']} is no kernel that a file may build", where=path)
        module = cls.from_artifact(config, tensors)
        assert isinstance(module, nn.Module)
        unread = set(tensors) - set(module._parameters) - set(module._buffers)
        if unread and isinstance(module, KernelModule) and unread - set(module.stored_tensors()):
            raise ArtifactError(
                f"{cls.__name__} has no tensor {labels.shown(min(unread))}",
                where=path or "the model",
            )
        return module.train(entry["training"])

    def _from_parts(self, entry: dict[str, Any], path: str) -> nn.Module:
        is_graph = "graph" in entry
        cls = nn.Module if is_graph else find_module_class(entry["class"], self._decoder.allow)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        check_attribute_names(cls, entry, _INTERNAL, path)
        for name, value in entry.get("attributes", {}).items():
            module.__dict__[name] = self._decoder.decode(value)
        self._fill(module, entry, path)
        for name, child in renamed(entry.get("children", {}), path).items():
            module._modules[name] = self.decode(child, f"{path}.{name}".lstrip("."))
        module._modules.update(dict.fromkeys(check_path(n, path) for n in entry.get("absent", ())))
        check_module(module, path)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        if is_graph:
            module = self._graph_module(module, entry, path)
        module.training = entry["training"]
        return module

    def _fill(self, module: nn.Module, entry: dict[str, Any], path: str) -> None:
        frozen = {check_path(name, path) for name in entry.get("frozen", ())}
        for name, value in renamed(entry.get("parameters", {}), path).items():
            tensor = self._decoder.decode(value)
            if tensor is not None:
                _check_tensor(name, tensor)
                tensor = self._decoder.tensors.parameter(tensor, name not in frozen)
            module._parameters[name] = tensor
        for name, value in renamed(entry.get("buffers", {}), path).items():
            buffer = self._decoder.decode(value)
            if buffer is not None:
                _check_tensor(name, buffer)
            module._buffers[name] = buffer
        hidden = entry.get("non_persistent", ())
        module._non_persistent_buffers_set = {check_path(name, path) for name in hidden}

    def _graph_module(self, root: nn.Module, entry: dict[str, Any], path: str) -> nn.Module:
        graph = decode_graph(entry["graph"], self._decoder)
        check_targets(graph, root, path)
        module = DeferredGraphModule(root, graph)
        kept = {
            check_keyword(name, path): self._decoder.decode(value)
            for name, value in entry.get("preserved", {}).items()
        }
        for name, value in kept.items():
            if hasattr(module, name):
                raise ArtifactError(f"{name!r} is no attribute to preserve", where=path)
            setattr(module, name, value)
        if kept:
            module.meta[_USER_PRESERVED_ATTRIBUTES_KEY] = kept
        return module


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise ArtifactError(f"{name} is no tensor", where=name)


def _checked(path: str, where: str) -> str:
    """``path`` as it is, if a file can hold it."""
    check_path(path, where)
    return path


# Functions that a trace left whole (``torch.fx.wrap``), taken apart for the file where that is possible.
#
# A file holds operators, not anybody's functions; see ``backquant.graph.folding``.
def inlined(graph: fx.Graph, allow: Sequence[str] = ()) -> fx.Graph:
    """``graph``, or one like it with the operators of functions in place of calls that no file can hold.

    A function that cannot be taken apart is left: storing it is refused by name.

    >>> def twice(x, times):
    ...     return x * 2 if times == 2 else x
    >>> graph = fx.Graph()
    >>> _ = graph.output(graph.call_function(twice, (graph.placeholder("x"), 2)))
    >>> [node.name for node in inlined(graph).nodes], len(graph.nodes)
    (['x', 'mul', 'output'], 3)
    """
    if not any(_is_foreign(node, allow) for node in graph.nodes):
        return graph
    graph = copied_graph(graph)
    for node in list(graph.nodes):
        if _is_foreign(node, allow):
            inline_call(graph, node)
    return graph


def _is_foreign(node: fx.Node, allow: Sequence[str]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, FunctionType):
        return False
    try:
        function_path(node.target, allow)
    except ArtifactError:
        return True
    return False
