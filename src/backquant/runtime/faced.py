"""What the user of a quantized model reads and edits, and when that is what runs.

Invariants

1. The model is a ``torch.fx.GraphModule``: each node's target is found among its modules, and its code runs.
2. ``graph_module`` computes the same, faster. It runs as long as nothing was changed: after an edit of the
   graph and ``recompile()``, or with another module in a child's place, the graph of the model runs as it
   stands, operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.fx import GraphModule

from backquant.errors import BackquantError, UsageError
from backquant.graph import DeferredGraphModule, copied_graph, take_graph
from backquant.runtime.edited import check_reads, edited_failure
from backquant.runtime.interpreted import traced
from backquant.runtime.packed_weights import PackedWeight
from backquant.runtime.watched import TABLES, Watched

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
        return packed[name].packed() if name in packed else super().__getattr__(name)

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

    def _dialect(self) -> GraphModule | None:
        """What is shown in place of ``graph_module``."""
        return None

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
