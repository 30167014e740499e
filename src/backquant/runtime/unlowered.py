"""Models of which nothing is lowered, and which call little: they run as they would without backquant.

To look at what a call is given, and to find its recording, costs more there than it saves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from backquant.errors import (
    ArtifactError,
    BackquantError,
    EngineError,
    InputError,
    UsageError,
    literal,
)
from backquant.graph import DeferredGraphModule, copied_graph, take_graph
from backquant.graph.call_table import failed_node
from backquant.graph.example import ExampleSpec, image_fix
from backquant.graph.interception import is_watched
from backquant.lower.engine import is_built_in
from backquant.runtime.dialect_operators import PackedWeight
from backquant.runtime.interpreted import Interpreted, traced
from backquant.runtime.kernel_facts import kernel_qparams
from backquant.runtime.record import LoweredRecord
from backquant.runtime.unchanged import TABLES, Watched

# What the user of a quantized model reads and edits, and when that is what runs.
#
# Invariants
#
# 1. The model is a ``torch.fx.GraphModule``: each node's target is found among its modules, and its code
#   runs.
# 2. ``graph_module`` computes the same, faster. It runs as long as nothing was changed: after an edit of the
# graph and ``recompile()``, or with another module in a child's place, the graph of the model runs as it
# stands, operator by operator.

_GENERATED = ("_code", "_lineno_map", "_prologue_start", "_tracer_cls", "_tracer_extras", "meta")
_CODE = ("compilation", "_program")
_OWN = frozenset({*TABLES, *_GENERATED, *_CODE, "_graph", "_watched"})


class Faced(DeferredGraphModule):
    """A graph module in front of another one, ``graph_module``, that does the same.

    >>> model = Faced(nn.Module(), fx.Graph())
    >>> model._begin_face(fx.symbolic_trace(nn.Sequential(nn.ReLU())))
    >>> dict(model.named_modules())[[*model.graph.nodes][1].target], model._is_unchanged()
    (ReLU(), True)
    """

    graph_module: GraphModule
    _watched: Watched

    def _begin_face(self, graph_module: GraphModule, face: GraphModule | None = None) -> None:
        """Show ``face``; where there is none, the graph of ``graph_module``, over its modules."""
        shown = graph_module if face is None else face
        graph = copied_graph(graph_module.graph) if face is None else face.graph
        packed = {n: v for n, v in vars(shown).items() if isinstance(v, PackedWeight)}
        self.__dict__["_packed_weights"] = packed
        self.__dict__["_weight_numbers"] = {
            name: value for weight in packed.values() for name, value in weight.attributes().items()
        }
        tables = {table: vars(shown)[table] for table in TABLES}
        self._show(graph_module, graph, tables, with_tensors=face is not None)

    def _show(
        self, graph_module: GraphModule, graph: fx.Graph, tables: Any, *, with_tensors: bool
    ) -> None:
        # in the dictionary: it is no child, and has no keys in the ``state_dict``
        self.__dict__.update(tables, graph_module=graph_module, meta=graph_module.meta)
        take_graph(self, graph, graph_module)
        self._lineno_map, self._prologue_start = {}, 0  # torch.compile reads them
        self._watched = Watched(self, with_tensors=with_tensors)

    def __getattr__(self, name: str) -> Any:
        packed = self.__dict__.get("_packed_weights", {})
        if name in packed:
            return packed[name].packed()
        numbers = self.__dict__.get("_weight_numbers", {})
        return numbers[name] if name in numbers else super().__getattr__(name)

    @property
    def graph(self) -> fx.Graph:
        """The graph. ``torch.export`` asks for it to run it on tensors without values: raises ``UsageError``,
        with what can be exported instead, where there are kernels."""
        if torch.compiler.is_exporting() and self._has_kernels():
            raise traced("torch.export")
        return super().graph

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        GraphModule.graph.fset(self, graph)  # type: ignore[attr-defined]

    def _has_kernels(self) -> bool:
        return False

    def _is_unchanged(self) -> bool:
        """Invariant 2."""
        return self._watched.is_unchanged()

    def recompile(self) -> Any:
        """Take over what was changed in ``graph``, as ``torch.fx.GraphModule``."""
        written = super().recompile()
        kind: Any = type(self)
        # what runs the graph is put into the class; here it runs after an edit only
        kind._as_written = vars(kind)["forward"]
        del kind.forward
        if "__call__" in vars(kind):  # of a code generator of torch.fx
            del kind.__call__
        if "_watched" in self.__dict__:
            self._watched.look_at(self.graph)
        return written

    def _literally(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph as it stands."""
        _ = self.code
        if not self._watched.with_tensors:
            check_reads(self, self._watched.nodes())
        run: Callable[..., Any] = type(self)._as_written  # type: ignore[attr-defined]
        try:
            return run(self, *args, **kwargs)
        except BackquantError:
            raise
        except Exception as error:
            raise edited_failure(error, self) from error

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which asks for this first. Raises UsageError."""
        raise UsageError(
            "a quantized model has no TorchScript",
            where="called under torch.jit.script",
            fix="backquant.save(quantized, path) stores it, quantized.compile() makes it faster, and "
            "backquant.export(quantized, path) takes it elsewhere",
        )

    def _held(self) -> dict[str, Any]:
        """The attributes, without code and what the graph generates; with what is shown, where that is not
        ``graph_module``."""
        state = {name: value for name, value in self.__dict__.items() if name not in _OWN}
        is_same = self._watched.is_same()
        if self._watched.with_tensors or not is_same:
            shown = {name: self.__dict__[name] for name in (*TABLES, "_graph")}
            state["_shown"] = {**shown, "is_same": is_same}
        return state

    def _hold(self, state: dict[str, Any]) -> None:
        """The inverse of ``_held``."""
        shown = state.pop("_shown", None)
        fx.GraphModule.__init__(self, nn.Module(), fx.Graph(), class_name="QuantizedModel")
        self.__dict__.update(state)
        if shown is None:
            self._begin_face(state["graph_module"])
            return
        tables = {table: shown[table] for table in TABLES}
        graph = copied_graph(shown["_graph"])
        self._show(state["graph_module"], graph, tables, with_tensors=True)
        self._watched.is_void = not shown["is_same"]


# Graphs that were edited, and do not run: which operator fails, and why.
#
# 1. Values between quantized operators are integers. A new operator that reads them as if they were floats
# fails on PyTorch's quantized tensors; on the plain integers of kernels it would give wrong numbers, and is
# refused before the call.
# 2. Any other failure says what the operator says.

_QUANTIZED = "'QuantizedCPU' backend"
_SHAPES = (getattr, "size", "shape", "dim", "numel")


def edited_failure(error: Exception, model: fx.GraphModule) -> UsageError:
    """The error of ours for ``error``, which a run of the edited graph of ``model`` raised."""
    node = failed_node(error, model)
    if node is not None and _QUANTIZED in str(error):
        return reads_integers(node, next(iter(node.all_input_nodes), node))
    return UsageError(
        f"the graph, as it was edited, fails: {sentence(error)}",
        where="QuantizedModel.graph" if node is None else f"node {node.format_node()}",
        fix="quantized.graph.print_tabular() shows what each operator gets",
    )


def reads_integers(node: fx.Node, source: fx.Node) -> UsageError:
    """The error for an operator of floats that reads integers.

    >>> graph = fx.symbolic_trace(lambda x: x.sin()).graph
    >>> print(reads_integers(graph.find_nodes(op="call_method", target="sin")[0], next(iter(graph.nodes))))
    the graph, as it was edited, fails: `sin` is an operator of floats, and reads the integers of `x`
      where  node %sin : [num_users=1] = call_method[target=sin](args = (%x,), kwargs = {})
      fix    put the operator after `dequantize`, or leave `x` in float:
             qconfig_mapping.set_module_name(..., None)
    """
    return UsageError(
        f"the graph, as it was edited, fails: `{node.name}` is an operator of floats, and reads the "
        f"integers of `{source.name}`",
        where=f"node {node.format_node()}",
        fix=f"put the operator after `dequantize`, or leave `{source.name}` in float:\n"
        "qconfig_mapping.set_module_name(..., None)",
    )


def check_reads(model: fx.GraphModule, before: set[fx.Node]) -> None:
    """Rule 1 for the plain integers of kernels: ``before`` are the nodes that were there at first.

    Raises UsageError.
    """
    for source in model.graph.nodes:
        if source in before and source.op.startswith("call_"):
            for node in _new_readers(source, before):
                qparams = kernel_qparams(model, source)
                if qparams is not None and qparams.output is not None:
                    raise reads_integers(node, source)


def _new_readers(source: fx.Node, before: set[fx.Node]) -> Iterator[Any]:
    for node in source.users:
        if node not in before and node.op.startswith("call_") and node.target not in _SHAPES:
            yield node


_FEW = 4  # up to so many calls, interpreting takes less time than looking up a recording


def calls_little(graph_module: GraphModule, record: LoweredRecord) -> bool:
    """Whether ``graph_module`` is float alone, traced, and of few calls.

    >>> from backquant import BackendConfig, QConfigMapping
    >>> from backquant.match import Plan
    >>> record = LoweredRecord(Plan("x86"), BackendConfig("x86"), QConfigMapping())
    >>> calls_little(torch.fx.symbolic_trace(torch.nn.ReLU()), record)  # a reference model
    False
    """
    if record.engine is None or record.kernels or record.interface or record.inputs:
        return False
    calls = [node for node in graph_module.graph.nodes if node.op.startswith("call_")]
    return len(calls) <= _FEW


def called_alone(graph_module: GraphModule) -> str:
    """The one module that ``graph_module`` calls, if it does nothing else: with its own arguments, as they
    come. Empty: there is none.

    >>> from backquant.graph.capture import called_whole
    >>> called_alone(called_whole(torch.nn.GRUCell(2, 2)))
    'grucell'
    >>> called_alone(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())))
    ''
    """
    if len(graph_module.graph.nodes) < 2:
        return ""
    *inputs, call, output = graph_module.graph.nodes
    name = str(call.target)
    if (
        call.op != "call_module"
        or call.args != tuple(inputs)
        or call.kwargs
        or output.args != (call,)
    ):
        return ""
    module = graph_module._modules.get(name)
    if module is None or isinstance(module, GraphModule):
        return ""
    taken = inspect.signature(module.forward).parameters.values()
    given = [
        (node.target, node.args[0] if node.args else inspect.Parameter.empty) for node in inputs
    ]
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in taken)
    return name if plain and [(p.name, p.default) for p in taken] == given else ""


def without_gradients(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``run(*args, **kwargs)`` under ``torch.no_grad()``, which takes time where there are none anyway.

    >>> without_gradients(torch.is_grad_enabled, (), {})
    False
    """
    if torch.compiler.is_dynamo_compiling():
        with torch.no_grad():
            return run(*args, **kwargs)
    torch._C._set_grad_enabled(False)  # a fifth of the time of ``torch.no_grad``, which calls it
    try:
        return run(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(True)


class FastCallModule(Faced):
    """A module with a ``graph_module``, which runs without what modules, and checks, put around it where it
    is plain and nobody looks.

    >>> model = FastCallModule(torch.nn.Module(), torch.fx.Graph())
    >>> model._begin_face(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> model._begin_plainly(True)
    >>> model(torch.tensor([-1.0]))
    tensor([0.])
    """

    record: LoweredRecord
    source: str
    _is_plain = False
    _alone = ""

    def _begin_plainly(self, is_plain: bool) -> None:
        self._is_plain = is_plain
        self._alone = called_alone(self.graph_module) if is_plain else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``forward`` gives. Raises what it raises."""
        # The fast path has few steps: a recurrent cell takes 25 µs in all.
        if not self._is_plain or is_watched() or self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*args, **kwargs)
        if not self._is_unchanged():
            return super().__call__(*args, **kwargs)
        run: Any = self.graph_module
        if not run._forward_hooks and not run._forward_pre_hooks:
            called = run._modules[self._alone] if self._alone else run
            if called._forward_hooks or called._forward_pre_hooks:
                called = run
            run = called.forward
        try:
            if torch.is_grad_enabled():
                return without_gradients(run, args, kwargs)
            return run(*args, **kwargs)
        except Exception as error:
            raise_told(self, error, (args, kwargs))


# Which kernel of another package's engine failed, and for which layer.


def failure(
    model: FastCallModule, error: Exception, inputs: tuple[Sequence[Any], Mapping[str, Any]]
) -> BackquantError:
    """The error of ours for ``error``: that of a kernel of another package names its layer, any other says
    which inputs it was called with (``failed_call``).

    >>> import backquant
    >>> x, layer = torch.ones(1, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> model = backquant.quantize(layer, calibration=[x], slower="keep")
    >>> print(failure(model, RuntimeError("shapes differ"), ((x,), {})).what)
    the model fails on these inputs: shapes differ
    """
    elsewhere = _elsewhere(inputs) if model.record.engine is not None else ""
    if elsewhere:
        return InputError(
            f"an input is on {elsewhere}, and the model's kernels run on the CPU",
            where=f"engine {model.record.engine.name}" if model.record.engine else "",
            fix="quantized(x.cpu())",
        )
    of_kernel = _failed_kernel(error, model.graph_module, model.record, inputs)
    return of_kernel or failed_call(error, inputs, model.record.example, model.source)


def raise_told(
    model: FastCallModule, error: Exception, inputs: tuple[Sequence[Any], Mapping[str, Any]]
) -> NoReturn:
    """Raise ``failure``; an error of ours as it is.

    >>> import backquant
    >>> x, layer = torch.ones(1, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> model = backquant.quantize(layer, calibration=[x], slower="keep")
    >>> try: raise_told(model, RuntimeError("shapes differ"), ((x,), {}))
    ... except BackquantError as error: print(error.what)
    the model fails on these inputs: shapes differ
    """
    told = failure(model, error, inputs)
    if told is error:
        raise error
    raise told from error


def _elsewhere(inputs: tuple[Sequence[Any], Mapping[str, Any]]) -> str:
    """The device of an input that is not on the CPU."""
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return next((str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"), "")


def _failed_kernel(
    error: Exception,
    module: fx.GraphModule,
    record: LoweredRecord,
    inputs: tuple[Sequence[Any], Mapping[str, Any]],
) -> EngineError | None:
    """A recorded call says less than the graph: it is run once more, operator by operator."""
    engine = record.engine
    if isinstance(error, BackquantError) or engine is None or is_built_in(engine.name):
        return None
    node = failed_node(error, module)
    if node is None:
        try:
            with torch.no_grad():
                Interpreted(module)(*inputs[0], **inputs[1])
        except Exception as again:
            node, error = failed_node(again, module), again
    uses = (use for use in record.kernels if node is not None and _stands_for(node, use.nodes))
    use = next(uses, None)
    if use is None or node is None:
        return None
    decisions = (record.plan.decisions.get(name) for name in use.nodes)
    paths = (decision.module_path for decision in decisions if decision is not None)
    layer = next(filter(None, paths), use.nodes[0])
    return EngineError(
        f"the kernel {use.kernel} of the engine {use.engine} failed: {sentence(error)}",
        where=f"{layer}, node {node.name}",
        fix=f"qconfig_mapping.set_module_name({literal(layer)}, None) leaves it in float",
    )


def _stands_for(node: fx.Node, names: tuple[str, ...]) -> bool:
    return node.name in names or any(node.name == f"{name}_lowered" for name in names)


# The error of a model that cannot run on its inputs, with more than the failing operator's message.

_LONGEST = 300
_RAISED = ("RuntimeError: ", "IndexError: ", "ValueError: ", "TypeError: ", "NotImplementedError: ")


def failed_call(
    error: Exception,
    inputs: tuple[Sequence[Any], Mapping[str, Any]],
    example: ExampleSpec | None,
    source: str,
) -> BackquantError:
    """The error of ours for ``error``, which an operator raised; one of ours is given back.

    ``source`` names the file that the model came from, if any. Where it fails on inputs of the dtypes and
    shapes that it was calibrated with, the file is at fault, else the inputs.

    >>> print(failed_call(RuntimeError("shapes differ"), ((torch.ones(3),), {}), None, ""))
    the model fails on these inputs: shapes differ
      where  float32[3]
    """
    if isinstance(inputs[0], fx.Proxy):
        return traced("torch.fx")
    given = _told(inputs[0], inputs[1])
    needed = "" if example is None else _told(example.args, example.kwargs)
    words = error.what if isinstance(error, BackquantError) else sentence(error)
    words = words[:_LONGEST]
    if (
        source
        and given == needed
        and not isinstance(error, (ArtifactError, EngineError, UsageError))
    ):
        return ArtifactError(
            f"the graph in the file cannot run: {words}",
            where=f"{source}, called with {given}",
            fix="backquant.save(quantized, path) again; what saved this file wrote another graph",
        )
    differ = needed not in ("", given)
    fix = f"inputs like those of the calibration: {needed}" if differ else ""
    images = _image_fix(example, inputs[0]) if example is not None else ""
    if isinstance(error, InputError) and differ and error.where.endswith("]"):
        # of a kernel, which names the tensor that it got
        own = error.fix if error.where == given else fix
        return InputError(error.what, where=given, fix=images or own)
    if isinstance(error, BackquantError):
        return error
    fix = images or fix
    return InputError(
        f"the model fails on these inputs: {words}",
        where=given or "called without arguments",
        fix=fix,
    )


def _image_fix(example: ExampleSpec, args: Sequence[Any]) -> str:
    """``image_fix`` of the first input of four axes that is another one than the floats of ``example``."""
    for spec, value in zip(example.args, args, strict=False):
        sizes = spec.get("tensor") if isinstance(spec, Mapping) else None
        if not isinstance(sizes, (list, tuple)) or "float" not in str(spec.get("dtype")):
            continue
        is_plain = isinstance(value, torch.Tensor) and not value.is_nested  # which have no sizes
        if is_plain and value.dim() == len(sizes) == 4:
            fix = image_fix(sizes[1], value)
            if fix:
                return fix
    return ""


def sentence(error: Exception) -> str:
    """What an operator says of itself; what runs a recording puts it last.

    >>> text = "The following operation failed in the TorchScript interpreter.\\n...\\nRuntimeError: no such"
    >>> sentence(RuntimeError(text)), sentence(KeyError())
    ('no such', 'KeyError')
    """
    return _last(str(error)) or type(error).__name__


def _last(text: str) -> str:
    first, *rest = text.strip().split("\n")
    if not rest or "TorchScript interpreter" not in first:
        return first
    return next((r.partition(": ")[2] for r in rest if r.startswith(_RAISED)), first)


def _told(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    named = [f"{name}={_one(value)}" for name, value in kwargs.items()]
    return ", ".join([*map(_one, args), *named])[:_LONGEST]


def _one(value: Any) -> str:
    try:
        return _described(value)
    except Exception:  # a nested tensor has no shape, and ``repr`` of a user class may fail
        return type(value).__name__


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        words = [f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"]
        words += [str(value.layout)] * (value.layout is not torch.strided)
        words += [f"on {value.device}"] * (value.device.type != "cpu")
        return " ".join(words)
    sizes = value.get("tensor") if isinstance(value, Mapping) else None
    if isinstance(sizes, (list, tuple)) and "dtype" in value:
        return f"{value['dtype']}{list(sizes)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_one, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_one(item)}' for key, item in value.items())}}}"
    return repr(value)[:60]
