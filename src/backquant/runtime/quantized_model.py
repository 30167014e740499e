"""The lowered model as its user holds it: called like the original, with a record of what it is."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY
from torch.utils._pytree import tree_map

from backquant.backend_config import BackendConfig
from backquant.dtypes import QParams
from backquant.errors import ArtifactError, UsageError
from backquant.graph.call_table import CallTableModule
from backquant.graph.example import ExampleSpec
from backquant.graph.export import Interface
from backquant.graph.interception import is_exporting, stand_ins
from backquant.lower.engine import engine_here
from backquant.lower.kernels.engine_setting import running
from backquant.lower.machine import EngineInfo
from backquant.lower.rule import KernelUse
from backquant.match.plan import Plan, Reason
from backquant.prepare.record import dump, graph_from_rows, graph_rows, load
from backquant.runtime.boundary import (
    check_finite,
    check_storages,
    integer_arguments,
    plain,
    quantized_inputs,
    returned_tensors,
    with_own_memory,
)
from backquant.runtime.checkpointed import Checkpointed, Origin, adopt
from backquant.runtime.dialect import shown_of
from backquant.runtime.interpreted import (
    Interpreted,
    check_not_traced,
    refuse_export,
    refuse_strict_export,
    traced,
)
from backquant.runtime.kernel_facts import Audit, KernelQParams, audit, qparams_by_name
from backquant.runtime.record import Executor, LoweredRecord
from backquant.runtime.replay import Replays
from backquant.runtime.unchanged import TABLES, fingerprint
from backquant.runtime.unlowered import FastCallModule, calls_little, raise_told, without_gradients
from backquant.uncompiled import uncompiled

if TYPE_CHECKING:
    from backquant.runtime.compiled import Compilation
    from backquant.runtime.compiled.program import CompiledProgram


# Pickling of lowered models: nodes with their names, operators and functions by name.
#
# ``backquant.save`` writes a file that holds no pickle; this is for what pickles whole models (copies
# between processes, ``torch.save``).


_GRAPH = "graph_module"
_SHOWN = "_shown"
# Attributes that a graph module generates from its graph.
_OWN = frozenset({"_graph", "_code", "_tracer_cls", "_tracer_extras", "shape_env"})


def pickled(state: Mapping[str, Any]) -> bytes:
    """The state of a module with a ``graph_module`` as bytes.

    Raises ArtifactError when it holds what ``pickle`` cannot store, such as a fuser that is a lambda.

    >>> import torch
    >>> state, root, rows = load(pickled({"graph_module": torch.fx.symbolic_trace(nn.ReLU())}))
    >>> [row[3] for row in rows]
    ['input_1', 'relu', 'output']
    """
    rest = dict(state)
    graph_module: Any = rest.pop(_GRAPH)
    root = {name: value for name, value in graph_module.__dict__.items() if name not in _OWN}
    if _SHOWN in rest:
        shown = rest[_SHOWN]
        rest[_SHOWN] = {**shown, "_graph": graph_rows(shown["_graph"])}
    try:
        return dump((rest, root, graph_rows(graph_module.graph)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArtifactError(
            f"the model holds something that pickle cannot store: {error}",
            where="pickle of a QuantizedModel",
            fix='backquant.save(quantized, "model.bq"), and backquant.load("model.bq")',
        ) from error


def unpickled(stored: bytes) -> dict[str, Any]:
    """The inverse of ``pickled``. As with any pickle, load only what you trust.

    >>> import torch
    >>> again = unpickled(pickled({"graph_module": torch.fx.symbolic_trace(nn.ReLU())}))["graph_module"]
    >>> again(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    state, body, rows = load(stored)
    root = nn.Module()
    root.__dict__.update({name: value for name, value in body.items() if name != "meta"})
    graph_module = CallTableModule(root, graph_from_rows(rows))
    graph_module.meta.update(body.get("meta", {}))
    graph_module.train(root.training)
    if _SHOWN in state:
        state[_SHOWN]["_graph"] = graph_from_rows(state[_SHOWN]["_graph"])
    return {**state, _GRAPH: graph_module}


class QuantizedModel(Checkpointed, FastCallModule):
    """A quantized model: floats in, floats out, like the model it was made from.

    A ``torch.fx.GraphModule``: its graph and code can be read, edited, recompiled and interpreted, its
    modules are found by the paths that they had, and can have hooks. ``graph_module`` is what runs as long
    as nothing was changed. ``qparams``: scales and zero points by the names of the modules.
    ``record``: what is known of it; ``plan``, ``report``, ``engine`` and the like read that.
    ``source``: its file, if it was loaded. ``original_weights_lookup``: set by ``convert_fx`` if asked for.
    ``input_qparams`` and ``output_qparams`` are of those that are integers (``integer_io``, or a
    ``PrepareCustomConfig``). Such an input is a plain integer tensor; floats and PyTorch's quantized tensors
    are brought to these qparams. Such an output is a plain integer tensor.

    ``replays``: inputs of a kind (shapes and dtypes) that came before run as one recorded graph, without
    Python between the operators; ``model.replays = None`` switches that off.

    ``compile()`` gives a model with compiled code. ``torch.compile(model)`` runs a lowered model as it is,
    and compiles what is around it; a reference model it compiles, to integer kernels where
    ``torch._inductor.config.freezing`` is set.

    NaN and infinities in inputs that are quantized are refused: as integers they are numbers like others.
    The check takes some 10 µs of a call; with ``check_finite = False``, which ``save`` keeps, they are taken.

    Attributes that a custom config preserves are there, too, unless they are named as one of these.
    Inference only: no gradients go through integers, and ``train()`` does not change it.

    ``state_dict`` and ``load_state_dict``: see ``Checkpointed``. ``backquant.save`` stores everything.

    >>> from backquant import BackendConfig, QConfigMapping
    >>> graph_module = torch.fx.symbolic_trace(torch.nn.Identity())
    >>> record = LoweredRecord(Plan("x86"), BackendConfig("x86"), QConfigMapping())
    >>> model = QuantizedModel(graph_module, record)
    >>> model(torch.ones(1)), model.engine
    (tensor([1.]), None)
    """

    original_weights_lookup: dict[str, list[torch.Tensor | None]]
    check_finite: bool = True

    def __init__(
        self, graph_module: GraphModule, record: LoweredRecord, origin: Origin | None = None
    ) -> None:
        super().__init__(nn.Module(), Graph(), class_name="QuantizedModel")
        self.record, self.origin = record, origin
        self._begin_face(graph_module, shown_of(record, origin, graph_module))
        self.source = ""
        self.replays: Replays | None = None
        self._quantized_inputs = quantized_inputs(graph_module)
        self.eval()
        graph_module.eval()  # its modules need not be those that are shown
        for name, value in graph_module.meta.get(_USER_PRESERVED_ATTRIBUTES_KEY, {}).items():
            if not hasattr(self, name):
                setattr(self, name, value)
        self._begin_replays()

    def _begin_replays(self) -> None:
        """Without an engine, or on the integer reference, the model is there to be read, not to be fast."""
        slow = self.engine is None or self.engine.as_described
        self._returned = returned_tensors(self.graph_module)
        guarded = self._quantized_inputs or self._returned
        self._begin_plainly(not guarded and calls_little(self.graph_module, self.record))
        interface = None if self.record.inputs else self.interface
        self.replays = None if slow or self._is_plain else Replays(self.graph_module, interface)

    def _shows_tensors(self) -> bool:
        return self._watched.with_tensors

    def check_unedited(self, where: str) -> None:
        """Raise ``UsageError`` where graph, modules or tensors were changed: ``graph_module`` is as it was.

        >>> import backquant
        >>> layer = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> model = backquant.quantize(layer, calibration=[torch.ones(1, 2)], slower="keep")
        >>> model.get_submodule("2").set_weight_bias(model.get_submodule("2").weight(), torch.ones(2))
        >>> model.check_unedited("backquant.save")
        Traceback (most recent call last):
        ...
        backquant.errors.UsageError: the model was changed after it was quantized, and is taken as it was made
          where  backquant.save
          fix    quantized.load_state_dict(quantized.state_dict())   # weights and scales as they are now
        """
        if self._watched.is_same():
            return
        fix = "quantized.load_state_dict(quantized.state_dict())   # weights and scales as they are now"
        if not self._watched.has_same_graph or self.origin is None:
            fix = "pickle.dumps(quantized)   # keeps it as it is now"
        what = "the model was changed after it was quantized, and is taken as it was made"
        raise UsageError(what, where=where, fix=fix)

    def _take_over(self, other: QuantizedModel) -> None:
        edited = None if self._watched.has_same_graph else self.graph
        own = {table: dict(vars(self)[table]) for table in TABLES}
        adopt(self.graph_module, other.graph_module)
        report_of = other.record.report_of or self.record.report_of  # of a file: as it was saved
        self.record, self.origin = replace(other.record, report_of=report_of), other.origin
        face = shown_of(self.record, self.origin, other.graph_module)
        if face is not None:
            adopt(self, face)
        self._begin_face(other.graph_module, face)
        if edited is not None:
            for table, values in own.items():
                vars(self)[table].update({k: values[k] for k in values.keys() - vars(self)[table]})
            self.graph = edited
        self._begin_replays()

    def _has_kernels(self) -> bool:
        return self.engine is not None

    @property
    def plan(self) -> Plan:
        """The decision for each operator."""
        return self.record.plan

    @property
    def backend_config(self) -> BackendConfig:
        """What was quantized for."""
        return self.record.backend_config

    @property
    def engine(self) -> EngineInfo | None:
        """The engine, with its instruction set; ``None`` for a reference model."""
        return self.record.engine

    @property
    def kernels(self) -> tuple[KernelUse, ...]:
        """The kernels, each with the operators that it computes."""
        return self.record.kernels

    @property
    def left_in_float(self) -> tuple[Reason, ...]:
        """Why the lowering left operators in float."""
        return self.record.left_in_float

    @property
    def report(self) -> Any:
        """What each operator became, and why: built when it is read; of a loaded model, as saved."""
        return self.record.report(self)

    @property
    def example(self) -> ExampleSpec | None:
        """Shapes and dtypes of inputs that it takes."""
        return self.record.example

    @property
    def interface(self) -> Interface | None:
        """Inputs and outputs as ``torch.export`` describes them; inputs are checked. ``None``: traced."""
        return self.record.interface

    @property
    def input_qparams(self) -> dict[int, QParams]:
        """What the integers of quantized inputs stand for, by position."""
        return {i: q for i, q in self.record.inputs.items() if q is not None}

    @property
    def output_qparams(self) -> dict[int | str, QParams]:
        """What the integers of quantized outputs stand for, by position."""
        return {i: q for i, q in self.record.outputs.items() if q is not None}

    @property
    def qparams(self) -> dict[str, KernelQParams]:
        """Scales and zero points of the kernels, by the names of the modules that they run for.

        ``model.qparams["encoder.fc"].output`` is ``(scale, zero_point)`` of what ``encoder.fc`` gives. A
        function or method has the name of its node in ``plan``. Empty for a reference model.
        """
        return qparams_by_name(self.graph_module, self.plan, self.kernels)

    def __getstate__(self) -> dict[str, Any]:
        return {**self._held(), "replays": self.replays is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        wanted = state.get("replays", True)
        quantized = quantized_inputs(state["graph_module"])
        self._hold({**state, "replays": None, "_quantized_inputs": quantized})
        self._begin_replays()
        self.replays = self.replays if wanted else None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        is_same = self._watched.is_same()
        super()._apply(fn, recurse)
        self.graph_module._apply(fn, recurse)
        self._watched.renew(self, is_same=is_same)
        if self.replays is not None:
            self._begin_replays()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's arguments and result. Raises ``InputError`` where it cannot run on them,
        ``ArtifactError`` where it cannot although they are like the example that its file names."""
        if torch.compiler.is_dynamo_compiling():
            if self.record.engine is not None:
                if is_exporting():
                    refuse_export()
                return _uncompiled(self, args, kwargs)
            if is_exporting():
                refuse_strict_export()
            return self._called(args, kwargs)
        if stand_ins():
            if torch._C._is_tracing() and torch.onnx.is_in_onnx_export():
                raise traced("the TorchScript exporter of torch.onnx")
            return self._called(args, kwargs)  # the tracer handles errors itself
        if not self._is_plain:
            self._check_inputs(args, kwargs)
        try:
            return self._called(args, kwargs)
        except Exception as error:
            raise_told(self, error, (args, kwargs))

    def _check_inputs(self, args: Any, kwargs: dict[str, Any]) -> None:
        if isinstance(args, tuple):  # under symbolic_trace it is a proxy
            check_storages(args, kwargs)
            check_finite(self._quantized_inputs if self.check_finite else (), args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        interface = self.interface
        if self.record.inputs and self.input_qparams:
            args, kwargs = integer_arguments(
                self.graph_module.graph, self.input_qparams, args, kwargs
            )
        if interface is not None and self._checks_calls():
            interface.check(args, kwargs)
        given = args, kwargs  # without gradients ``torch.compile`` has a break less
        grad = torch.is_grad_enabled()
        result = without_gradients(self._run, given, {}) if grad else self._run(*given)
        if self._returned and not (torch.compiler.is_compiling() or stand_ins()):
            result = with_own_memory(result, self.graph_module, self._returned)
        return result if interface is None else interface.restored(result)

    def _literally(self, *args: Any, **kwargs: Any) -> Any:
        """The graph as it stands; what is shown gives PyTorch's quantized tensors at outputs."""
        if self.record.inputs and not self._shows_tensors():
            graph = self.graph_module.graph
            args, kwargs = integer_arguments(graph, self.input_qparams, args, kwargs)
        result = super()._literally(*args, **kwargs)
        return tree_map(plain, result) if self.record.outputs else result

    def _checks_calls(self) -> bool:
        """Whether the arguments are checked here; where there are recordings, the search for one does it."""
        return self.replays is None or bool(self.record.inputs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_same = self._is_unchanged()
        run: Executor = self.graph_module if is_same else self._literally
        if self.record.engine is not None:
            run = self.replays if is_same and self.replays is not None else Interpreted(run)
        if not self.record.kernels:
            return run(*args, **kwargs)
        with running():
            return run(*args, **kwargs)

    def compile(  # type: ignore[override]  # torch's changes the module in place
        self,
        example_inputs: Any = None,
        *,
        dynamic_shapes: Any = None,
        float_dtype: torch.dtype = torch.float32,
    ) -> CompiledModel:
        """This model with code that TorchInductor and a C++ compiler make for it. Takes seconds to
        minutes. This model is not changed.

        Where the CPU has AVX-512 VNNI, convolutions and linear layers are backquant's own kernels, which
        are compiled with it; elsewhere oneDNN's. What lies between them is generated code.

        Args:
            example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments, with
                the shapes to compile for. Default: those of the calibration.
            dynamic_shapes: which sizes may vary, as ``torch.export`` takes it, names in place of ``Dim``:
                ``{"x": {0: "batch"}}``. Default: none; other shapes run on the lowered model.
            float_dtype: ``torch.bfloat16`` for attention and products of two activations in it, where the
                CPU has instructions for that.

        Raises:
            EngineError: there is no C++ compiler, the CPU has no bfloat16, or the model cannot be compiled.
            UsageError: a reference model, no example inputs, or shapes that the model does not take.
        """
        from backquant.runtime.compiled import compile_lowered  # imports Inductor

        self.check_unedited("quantized.compile")
        made = compile_lowered(
            self.graph_module, self.record, example_inputs, dynamic_shapes, float_dtype
        )
        return CompiledModel._over(self, *made)

    def save(self, path: str | os.PathLike[str], **options: Any) -> None:
        """``backquant.save(self, path, ...)``: one file that runs without the model's code.

        Raises what ``backquant.save`` raises.
        """
        import backquant

        backquant.save(self, path, **options)

    def export(self, path: str | os.PathLike[str], **options: Any) -> Any:
        """``backquant.export(self, path, ...)``: a file for another runtime; what came out.

        Raises what ``backquant.export`` raises.
        """
        import backquant

        return backquant.export(self, path, **options)

    def train(self, mode: bool = True) -> QuantizedModel:  # noqa: ARG002 - see the class
        """Stay in evaluation mode."""
        return super().train(False)

    def audit(self) -> Audit:
        """Count integer kernels, boundaries, and weighted operators left in float."""
        return audit(self.graph_module)

    def get_extra_state(self) -> torch.Tensor:
        """A digest of what ``state_dict`` does not hold: the qparams of activations, the kernels."""
        return fingerprint(self.graph_module)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Refuse weights of another model, before any is loaded. Raises UsageError."""
        if not torch.equal(torch.as_tensor(state).cpu(), self.get_extra_state()):
            raise UsageError(
                "this state_dict is of a model with other qparams or other kernels",
                where="QuantizedModel.load_state_dict",
                fix='backquant.save(quantized, "model.bq"), and backquant.load("model.bq")',
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (_kind(self), pickled(self.__getstate__()))

    def __copy__(self) -> QuantizedModel:
        made: QuantizedModel = type(self).__new__(type(self))
        made.__setstate__(self.__getstate__())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedModel:
        made: QuantizedModel = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def extra_repr(self) -> str:
        engine = self.engine.describe() if self.engine is not None else "reference model"
        return f"{engine}, {len(self.kernels)} kernels, {len(self.left_in_float)} left in float"


class CompiledModel(QuantizedModel):
    """``QuantizedModel.compile()`` makes it: the same model, called the same way.

    ``compilation`` says what was compiled. Inputs of other shapes or dtypes run on the lowered model.
    The code holds the weights as they were; modules are shared with the model it was made from.

    ``backquant.save``, ``pickle`` and ``torch.save`` store the lowered model: compiled code is for one CPU.
    ``backquant.load`` gives it back, to be compiled again.
    """

    compilation: Compilation
    _program: CompiledProgram

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's arguments and result."""
        return super().forward(*args, **kwargs)

    def _checks_calls(self) -> bool:
        return True

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self._program.arguments(args, kwargs)
        if given is None:
            return super()._run(args, kwargs)
        check_not_traced()
        return self._program(given)

    @classmethod
    def _over(
        cls, model: QuantizedModel, program: CompiledProgram, compilation: Compilation
    ) -> CompiledModel:
        made: CompiledModel = cls.__new__(cls)
        made._hold(model._held())
        made._begin_replays()
        made._is_plain = False
        made._program, made.compilation = program, compilation
        return made

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the weights are in the code. Raises UsageError."""
        raise UsageError(
            "the weights of a compiled model are in its code",
            where="CompiledModel.load_state_dict",
            fix="quantized.load_state_dict(state); quantized.compile()   # the lowered model",
        )

    def lowered(self) -> QuantizedModel:
        """The model without the code, over the same modules."""
        made: QuantizedModel = QuantizedModel.__new__(QuantizedModel)
        made._hold(self._held())
        made._begin_replays()
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return self.lowered().__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        copied = self._over(self.lowered().__deepcopy__(memo), self._program, self.compilation)
        memo[id(self)] = copied
        return copied

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.compilation.describe()}"


@uncompiled  # type: ignore[untyped-decorator]
def _uncompiled(model: QuantizedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Kernels with packed weights, of which one overwrites its argument, are nothing for torch.compile."""
    return model.forward(*args, **kwargs)


def _kind(model: QuantizedModel) -> type[QuantizedModel]:
    """The class of a model: fx makes one of its own for each graph module."""
    return next(cls for cls in type(model).__mro__ if not cls.__qualname__.endswith("Impl"))


def _restored(kind: type[QuantizedModel], stored: bytes) -> QuantizedModel:
    state = unpickled(stored)
    if state["record"].engine is not None:
        engine_here(state["record"].engine)  # raises where sums would saturate on this CPU
    made: QuantizedModel = kind.__new__(kind)
    made.__setstate__(state)
    return made
