"""Modules that stay whole in an exported graph: one call each, whatever they do inside.

While a model is exported, the ``forward`` of such a module calls the operator ``backquant::opaque``
with the tensors among its arguments. Its outputs have the shapes that one real run gave; a size that
equals a dynamic size of an input is that size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from backquant.graph.clone import with_own_state
from backquant.graph.hooks import drop_hooks, forward_in_place

# What stops an export, and in which module.


class NotExportedError(Exception):
    """Why, in which module (``""`` for the model itself), and at which line."""

    def __init__(self, reason: str, path: str = "", line: str = "") -> None:
        super().__init__(reason)
        self.reason, self.path, self.line = reason, path, line

    def of_the_model(self) -> NotExportedError:
        """The same of the model itself: what stays whole already cannot be called by it, either."""
        told = NotExportedError(self.reason, "", self.line)
        told.__cause__ = self.__cause__
        return told


#: Placeholder for a tensor in the arguments of an opaque call.
TENSOR = object()


@dataclass
class OpaqueCall:
    """One call of an opaque module: its arguments and outputs, flat, tensors in order."""

    path: str
    # ``TENSOR`` for each tensor, other values as they are
    leaves: list[Any] = field(default_factory=list)
    spec: Any = None
    out_leaves: list[Any] = field(default_factory=list)
    out_spec: Any = None
    sizes: list[tuple[int, ...]] = field(
        default_factory=list
    )  # of the input tensors in the run on the example inputs; (): unknown


# The opaque calls of the export in progress, by their key in the graph.
_CALLS: dict[str, OpaqueCall] = {}


@cache
def opaque_operator() -> Any:
    """The operator ``backquant::opaque(str key, Tensor[] inputs) -> Tensor[]``.

    >>> str(opaque_operator())
    'backquant.opaque.default'
    """
    _LIBRARY.append(torch.library.Library("backquant", "FRAGMENT"))
    _LIBRARY[0].define("opaque(str key, Tensor[] inputs) -> Tensor[]")
    torch.library.register_fake("backquant::opaque", _fake, lib=_LIBRARY[0])
    return torch.ops.backquant.opaque.default


# kept alive: operators are unregistered with their library
_LIBRARY: list[torch.library.Library] = []


def _fake(key: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    call = _CALLS[key]
    tensors = [leaf for leaf in call.out_leaves if isinstance(leaf, torch.Tensor)]
    known: dict[int, Any] = {}
    for sizes, tensor in zip(call.sizes, inputs, strict=True):
        known |= dict(zip(sizes, tensor.shape, strict=bool(sizes)))
    like = inputs[0] if inputs else torch.empty(0)
    return [
        like.new_empty([known.get(size, size) for size in tensor.shape], dtype=tensor.dtype)
        for tensor in tensors
    ]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@dataclass
class Trial:
    """Modules at ``paths`` that may fail: ``failed`` are the errors of those that did, by path.

    They then give what an opaque module gives, so that one export finds all that fail. What it makes is to
    be thrown away where any did: the graph has parts of what failed.
    """

    paths: Collection[str]
    failed: dict[str, Exception] = field(default_factory=dict)

    def of(
        self, path: str, forward: Callable[..., Any], stand_in: Callable[..., Any]
    ) -> Callable[..., Any]:
        """``forward``, and ``stand_in`` where it fails."""

        def tried(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except Exception as error:  # torch.export raises errors of any class
                self.failed[path] = error
                return stand_in(*args, **kwargs)

        return tried


class _Recorder:
    """Notes each call of some modules during one real run; those ``on_trial`` may change arguments."""

    def __init__(self, on_trial: Collection[str]) -> None:
        self._on_trial = set(on_trial)
        self.calls: dict[str, list[OpaqueCall]] = {}
        self._begun: dict[str, tuple[Any, Any]] = {}

    def begins(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._begun[path] = _known(args, kwargs)

    def ends(self, path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        begun, spec = self._begun.pop(path)
        if (begun, spec) == _known(args, kwargs):
            call = OpaqueCall(path, [], spec, *pytree.tree_flatten(output), begun)
            self.calls.setdefault(path, []).append(call)
        elif path not in self._on_trial:
            reason = (
                f"{path!r} cannot be exported, and changes an argument in place, such as a cache"
            )
            raise NotExportedError(reason, path.rpartition(".")[0])


def _known(args: Any, kwargs: Any) -> tuple[list[tuple[int, ...]], Any]:
    """The shapes of the tensors among arguments (``()`` for the rest), and how the arguments are built."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return [tuple(leaf.shape) if _is_tensor(leaf) else () for leaf in leaves], spec


def _outermost(paths: Collection[str]) -> list[str]:
    """Those of ``paths`` that lie in none of the others.

    >>> _outermost(["a.b", "a", "ab"])
    ['a', 'ab']
    """
    known = set(paths)
    return [p for p in paths if known.isdisjoint(_around(p))]


def _around(path: str) -> Iterator[str]:
    """The paths of the modules that a module lies in."""
    while path := path.rpartition(".")[0]:
        yield path


@contextmanager
def opaque_calls(
    model: nn.Module,
    paths: Collection[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    trial: Trial | None = None,
) -> Iterator[dict[str, OpaqueCall]]:
    """Make the submodules at ``paths`` opaque while the context lasts; gives their calls by key.

    ``model`` is run once on the arguments. It must be a copy that nobody else uses. Those of ``trial`` are
    opaque only where they fail. Raises ``NotExportedError``, with the path of the module around it, for a
    module that changes its arguments.
    """
    calls: dict[str, OpaqueCall] = {}
    tried = [] if trial is None else trial.paths
    if not paths and not tried:
        yield calls
        return
    recorder = _Recorder(tried)
    known = set(paths)
    outside = [path for path in tried if known.isdisjoint(_around(path))]
    modules = {path: model.get_submodule(path) for path in (*_outermost(paths), *outside)}
    with ExitStack() as hooks, torch.no_grad(), with_own_state(model):
        for path, module in modules.items():
            begins, ends = partial(recorder.begins, path), partial(recorder.ends, path)
            # before hooks of the user's, which an export runs around the stand-in
            first = module.register_forward_pre_hook(begins, with_kwargs=True)
            last = module.register_forward_hook(ends, with_kwargs=True, prepend=True)
            hooks.callback(first.remove)
            hooks.callback(last.remove)
        model(*args, **kwargs)
    try:
        with ExitStack() as stack:
            for path, module in modules.items():
                stand_in = _stand_in(path, recorder.calls.get(path, []), calls)
                if trial is not None and path not in known:
                    stand_in = trial.of(path, module.forward, stand_in)
                stack.enter_context(forward_in_place(module, stand_in))
            yield calls
    finally:
        for key in calls:
            _CALLS.pop(key, None)
    for path in known & modules.keys():
        drop_hooks(modules[path])


@contextmanager
def known_calls(calls: Mapping[str, OpaqueCall]) -> Iterator[None]:
    """While it is open, programs with these calls, by key, can be traced again."""
    _CALLS.update(calls)
    try:
        yield
    finally:
        for key in calls:
            _CALLS.pop(key, None)


def _as_tensor(leaf: Any, path: str) -> Any:
    """``leaf``; a condition on the values of a tensor as a tensor, which the module reads at each call.

    Raises ``NotExportedError``, with the path of the module around (if there is one), for a number that
    values make.
    """
    # imported here: it loads the compiler, which loading a model does not need
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    if not has_free_unbacked_symbols(leaf):
        return leaf
    if isinstance(leaf, torch.SymBool):
        return torch.scalar_tensor(torch.sym_ite(leaf, 1, 0), dtype=torch.int64).bool()
    around = path.rpartition(".")[0]
    if not around:  # the whole model: the caller raises an error that says more
        return leaf
    reason = f"{path!r} cannot be exported, and takes a number that the values of a tensor make"
    raise NotExportedError(reason, around)


def _stand_in(path: str, recorded: list[OpaqueCall], calls: dict[str, OpaqueCall]) -> Any:
    remaining = iter(recorded)

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen = next(remaining, None)
        if seen is None:
            raise RuntimeError(f"{path} is called more often than with the example inputs")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [_as_tensor(leaf, path) for leaf in leaves]
        kept = [TENSOR if _is_tensor(leaf) else leaf for leaf in leaves]
        key = f"{path}#{len(calls)}"
        given = [leaf for leaf in leaves if _is_tensor(leaf)]
        # Where an export passes other arguments than the real run (a mask), their sizes are not known.
        sizes: list[tuple[int, ...]] = [()] * len(given)
        if spec == seen.spec:
            pairs = zip(leaves, seen.sizes, strict=True)
            found = [size for leaf, size in pairs if _is_tensor(leaf)]
            sizes = [s if len(s) == t.dim() else () for s, t in zip(found, given, strict=True)]
        call = OpaqueCall(path, kept, spec, seen.out_leaves, seen.out_spec, sizes)
        calls[key] = _CALLS[key] = call
        tensors = iter(opaque_operator()(key, given))
        out = [next(tensors) if _is_tensor(leaf) else leaf for leaf in call.out_leaves]
        return pytree.tree_unflatten(out, call.out_spec)

    return forward


# What recurrent layers give in an export: tensors of the sizes that follow from their arguments.
#
# PyTorch finds these sizes by computing the layer step by step, for the length of the example: minutes for a
# thousand steps where sizes are free, and the length is then fixed. In the program the layer is one operator
# either way.

_aten = torch.ops.aten
_LAYERS = (_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input)

#: The calls that recurrent modules make: of layers, over all steps, and of cells.
RECURRENT = (
    *_LAYERS,
    *(_aten.lstm_cell.default, _aten.gru_cell.default),
    *(_aten.rnn_tanh_cell.default, _aten.rnn_relu_cell.default),
)


@contextmanager
def recurrent_by_shape() -> Iterator[None]:
    """Within the block, tensors without values pass recurrent layers in one step.

    Nothing changes for tensors that have values, nor where a torch version finds the sizes otherwise.

    >>> import warnings
    >>> with recurrent_by_shape(), warnings.catch_warnings(action="ignore"):
    ...     program = torch.export.export(torch.nn.GRU(2, 3), (torch.zeros(1000, 1, 2),))
    >>> [tuple(node.meta["val"].shape) for node in program.graph.nodes if node.name == "getitem"]
    [(1000, 1, 3)]
    """
    replaced: list[tuple[Any, dict[Any, Any]]] = []
    try:
        for layer in _LAYERS:
            kernels = getattr(layer, "py_kernels", None)
            if isinstance(kernels, dict) and hasattr(layer, "_dispatch_cache"):
                replaced.append((layer, dict(kernels)))
                kernels.update({key: _by_shape(kernel) for key, kernel in kernels.items()})
                layer._dispatch_cache.clear()
        yield
    finally:
        for layer, kernels in replaced:
            layer.py_kernels.update(kernels)
            layer._dispatch_cache.clear()


def _by_shape(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: Any, hx: Any, *args: Any, **kwargs: Any) -> Any:
        # the arguments of the schema, all of which torch passes by position
        if not isinstance(input, FakeTensor) or len(args) != len(_ARGUMENTS) or kwargs:
            return kernel(input, hx, *args, **kwargs)
        named = dict(zip(_ARGUMENTS, args, strict=True))
        return _results(input, hx, named["bidirectional"], named["batch_first"])

    return call


_ARGUMENTS = (
    *("params", "has_biases", "num_layers", "dropout", "train"),
    *("bidirectional", "batch_first"),
)


def _results(
    x: torch.Tensor, state: Any, bidirectional: bool, batch_first: bool
) -> tuple[torch.Tensor, ...]:
    """Output (length, batch, features) and last state, or states, of a layer.

    >>> [tuple(t.shape) for t in _results(torch.zeros(2, 7, 4), torch.zeros(2, 2, 5), True, True)]
    [(2, 7, 10), (2, 2, 5)]
    """
    states = tuple(state) if isinstance(state, (tuple, list)) else (state,)
    batch, length = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    output = x.new_empty((length, batch, states[0].shape[-1] * (1 + bidirectional)))
    output = output.transpose(0, 1) if batch_first else output
    return (output, *(one.new_empty(one.shape) for one in states))
