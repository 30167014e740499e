"""The one lowering pass: apply a table of rules to a reference model.

The result computes on plain integer tensors between its boundaries. The reference model is not
changed; weights are shared with it, not copied. Cost: nodes × rules of that node's operator.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Graph, GraphModule, Node

from backquant.backend_config import DTypeConfig
from backquant.dtypes import QParams
from backquant.errors import PassError
from backquant.graph import (
    DeferredGraphModule,
    assemble,
    call_before,
    contract,
    copied_graph,
    graph_pass,
    reshape_views,
    run_pass,
    verify,
)
from backquant.graph.mutation import changes_argument
from backquant.lower.boundaries import fold_boundaries
from backquant.lower.chain import RuleIndex, index_rules, quantizes, site_of, steps_of
from backquant.lower.contracts import reference_modules_are_lowered
from backquant.lower.dynamic import static_cast
from backquant.lower.engine_info import EngineInfo
from backquant.lower.float_fallback import FloatFallback
from backquant.lower.fuse_attention import fuse_attention
from backquant.lower.fuse_followers import fuse_followers
from backquant.lower.fuse_shuffles import fuse_shuffles
from backquant.lower.kernels.boundary import saturate
from backquant.lower.kernels.configured import KernelModule
from backquant.lower.padded import pad_before
from backquant.lower.qdq import (
    dequantize_target,
    is_dequantize,
    is_quantize,
    is_weight_dequantize,
    qparams_of,
)
from backquant.lower.rule import IDENTITY, Emit, KernelUse, Lowered, LowerRule, Site
from backquant.match.plan import Reason
from backquant.native.library import ENGINES, is_here
from backquant.operators import moves_values
from backquant.prepare.record import KeptGraphModule


def lower(
    reference: GraphModule,
    rules: Sequence[LowerRule],
    engine: EngineInfo,
    separate: Collection[str] = (),
    in_float: Collection[str] = (),
    described: Mapping[str, DTypeConfig] | None = None,
) -> Lowered:
    """Lower ``reference`` (decomposed dialect, per-tensor literal qparams) with the table ``rules``.

    ``separate`` names nodes that are no business of the table: calls of standalone and custom modules.
    ``in_float``: operators that compute in float even between integers. ``described``: the dtype config of
    each quantized operator, which rules may read.

    Raises ``PassError`` when a rule breaks its contract: a defect of the table.

    >>> import torch
    >>> from backquant.lower import engine_info
    >>> class Float(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.relu(x)
    >>> lowered = lower(torch.fx.symbolic_trace(Float()), [], engine_info("x86"))
    >>> [(reason.node, reason.rule) for reason in lowered.left_in_float]
    [('relu', 'float-in-reference')]
    """
    taken, kept = frozenset(separate), frozenset(in_float)
    return run_pass(_lower, reference, rules, engine, taken, kept, described or {})


@contract(ensures=[reference_modules_are_lowered])
def _lower(
    reference: GraphModule,
    rules: Sequence[LowerRule],
    engine: EngineInfo,
    separate: frozenset[str],
    in_float: frozenset[str],
    described: Mapping[str, DTypeConfig],
) -> Lowered:
    result = assemble(DeferredGraphModule, copied_graph(reference.graph), reference)
    stated = frozenset(node.name for node in result.graph.nodes)
    run_pass(read_results, result.graph, result)
    run_pass(pad_before, result, for_kernels=True)
    run_pass(as_unsigned, result.graph, engine, separate)
    return _Pass(result, index_rules(tuple(rules)), engine, described, stated).run(
        separate, in_float
    )


class _Pass:
    """State of one run: the graph being edited and what was recorded."""

    def __init__(
        self,
        graph_module: GraphModule,
        index: RuleIndex,
        engine: EngineInfo,
        described: Mapping[str, DTypeConfig],
        stated: frozenset[str],
    ) -> None:
        self.stated = stated  # nodes of the reference model; what was written since has no record
        self.gm = graph_module
        self.index = index
        self.engine = engine
        self.described = described
        self.kernels: list[KernelUse] = []
        self.records: dict[Node, int] = {}
        self.fallback = FloatFallback(engine)
        self.erased: set[Node] = set()
        self.calls = Counter(n.target for n in graph_module.graph.nodes if n.op == "call_module")

    def run(self, separate: frozenset[str], in_float: frozenset[str]) -> Lowered:
        for node in list(self.gm.graph.nodes):
            if node.name in separate:
                self.fallback.made(node)
            elif node.name in in_float:
                self.fallback.note(node, [self.fallback.float_in_reference(node)])
            elif node not in self.erased and node.op.startswith("call_"):
                self._visit(node)
        run_pass(fold_boundaries, self.gm.graph, self.engine)
        run_pass(move_halves, self.gm.graph)
        run_pass(reshape_views, self.gm.graph)
        remaining = run_pass(fuse_followers, self.gm, self.kernels, self.records)
        remaining = run_pass(fuse_shuffles, self.gm, remaining, self.records)
        kernels = [use for use in remaining if use is not None]
        left = self.fallback.reasons(self.gm)
        if self.engine.name in ENGINES:
            left = self._attention(kernels, left)
        verify(self.gm, after="lowering")
        # A new graph module has only those constants that the graph still reads.
        result = assemble(KeptGraphModule, self.gm.graph, self.gm)
        result.recompile()
        return Lowered(result, tuple(kernels), left)

    def _attention(self, kernels: list[KernelUse], left: tuple[Reason, ...]) -> tuple[Reason, ...]:
        """Fuse attention. It stays among what is computed in float, and is noted in ``kernels`` where the
        library of kernels computes it."""
        fused = run_pass(fuse_attention, self.gm)
        if is_here():
            name = "backquant.attention"
            kernels += [KernelUse(each.core, name, torch.uint8, self.engine.name) for each in fused]
        moved = {name for each in fused for name in each.moved}
        return tuple(reason for reason in left if reason.node not in moved)

    def _visit(self, node: Node) -> None:
        if quantizes(node, self.engine) or is_dequantize(node) or is_weight_dequantize(node):
            return
        steps = steps_of(self.gm, node)
        if not steps:
            return
        refusals: list[Reason] = []
        described = self.described.get(node.name)
        for rule in self.index.get(steps[0].key, ()):
            site = site_of(self.gm, steps, rule, self.engine, described)
            if site is None:
                continue
            with graph_pass(f"lowering rule {rule.name}, at {node.name}"):
                made = rule.build(site)
            if isinstance(made, Emit):
                self._insert(site, made, rule)
                return
            if made is not None:
                refusals.append(made)
        self.fallback.note(node, refusals)

    def _insert(self, site: Site, emit: Emit, rule: LowerRule) -> None:
        names = tuple(node.name for node in site.nodes if node.name in self.stated)
        with self.gm.graph.inserting_before(site.last):
            new = self._create(site, emit)
            new.stack_trace = new.stack_trace or site.last.stack_trace
            self.fallback.made(new)
            if emit.out is not None and not emit.in_range and not emit.out.is_full_range:
                low, high = emit.out.quant_min, emit.out.quant_max
                new = self.gm.graph.call_function(saturate, (new, low, high))
                self.fallback.made(new)
        self._connect(site, emit, new)
        for node in reversed(site.nodes):
            if node.users:
                raise PassError(
                    f"{node.name} is still used after its kernel was inserted",
                    where=f"lowering rule {rule.name}",
                )
            self.gm.graph.erase_node(node)
            self.erased.add(node)
        if emit.kernel and names:
            dtype = emit.out.dtype if emit.out is not None else emit.float_dtype
            self.records[new] = len(self.kernels)
            self.kernels.append(KernelUse(names, emit.kernel, dtype, self.engine.name))

    def _create(self, site: Site, emit: Emit) -> Node:
        graph, name = self.gm.graph, f"{site.last.name}_lowered"
        if emit.target is IDENTITY:
            source = emit.args[0]
            assert isinstance(source, Node)
            return source
        if isinstance(emit.target, nn.Module):
            path = self._place(site, emit.target)
            if not emit.kwargs:
                return call_before(site.last, "call_module", path, emit.args, name)
            return graph.create_node("call_module", path, emit.args, dict(emit.kwargs), name)
        kind = "call_method" if isinstance(emit.target, str) else "call_function"
        return graph.create_node(kind, emit.target, emit.args, dict(emit.kwargs), name)

    def _place(self, site: Site, module: nn.Module) -> str:
        """The path of a new kernel module: that of the module it replaces, if nothing else calls it."""
        node = site.node
        path = str(node.target)
        if node.op != "call_module" or self.calls[node.target] > 1:
            path = f"{node.name}_kernel"
            while hasattr(self.gm, path):
                path += "_"
        if isinstance(module, KernelModule):
            module.train(self.gm.training)
        self.gm.add_submodule(path, module)
        return path

    def _connect(self, site: Site, emit: Emit, new: Node) -> None:
        if emit.out is None:
            site.last.replace_all_uses_with(new)
            if emit.each_item:
                self._note_items(new)
            return
        if emit.each_item:
            self._connect_items(site, emit.out, new)
            return
        if site.quantize is not None and emit.out == site.out:
            site.quantize.replace_all_uses_with(new)
            self.gm.graph.erase_node(site.quantize)
            self.erased.add(site.quantize)
            return
        dequantized = self._dequantize_after(new, emit.out)
        site.last.replace_all_uses_with(dequantized)

    def _note_items(self, new: Node) -> None:
        """Reading a part of a tuple is no operator."""
        for item in new.users:
            if item.target is operator.getitem:
                self.fallback.made(item)
                self._note_items(item)

    def _connect_items(self, site: Site, out: QParams, new: Node) -> None:
        for item in list(site.last.users):
            if item.target is not operator.getitem:
                raise PassError(f"{item.name} reads a tuple whole", where="lower")
            item.replace_input_with(site.last, new)
            self.fallback.made(item)
            readers = list(item.users)
            dequantized = self._dequantize_after(item, out)
            for reader in readers:
                reader.replace_input_with(item, dequantized)

    def _dequantize_after(self, node: Node, out: QParams) -> Node:
        with self.gm.graph.inserting_after(node):
            args: tuple[Any, ...] = (node, *out.literals)
            return self.gm.graph.call_function(dequantize_target(), args)


# Operators that only move values (``view``, ``transpose``) between two casts to float16 or bfloat16 move
# the narrow values.
#
# They are rounded already: to widen them for the operator and to round them again behind it changes nothing.


def move_halves(graph: Graph) -> None:
    """Take the casts around such operators out of ``graph``."""
    narrow: dict[Node, torch.dtype] = {}
    for node in list(graph.nodes):
        cast = static_cast(node)
        if cast is None:
            continue
        moved, dtype = cast
        widened = _only_source(moved)
        source = None if widened is None else static_cast(widened)
        if widened is None or source is None or narrow.get(source[0]) != dtype:
            narrow[node] = dtype
            continue
        moved.replace_input_with(widened, source[0])
        node.replace_all_uses_with(moved)
        narrow[moved] = dtype
        for erased in (node, widened):
            if not erased.users:
                graph.erase_node(erased)


def _only_source(node: Node) -> Node | None:
    """The one tensor that ``node`` moves the values of, for one reader."""
    sources = node.all_input_nodes
    is_one = (
        len(sources) == 1 and len(node.users) == 1 and node.op in ("call_function", "call_method")
    )
    return sources[0] if is_one and moves_values(node.target) else None


# Readers of a dequantized value that an in-place operator changed read that operator's result.
#
# An in-place operator gives the tensor that it changed, so a later reader of the one reads the other.
# Kernels change nothing in place: only the second form stays right when the operator becomes a kernel.


def read_results(graph: fx.Graph, modules: nn.Module) -> None:
    """Rewrite ``graph`` where it stands; costs the uses of the values that are changed in place.

    Args:
        graph: whose calls are written in an order in which they can run.
        modules: the root that its ``call_module`` nodes name.

    >>> import torch
    >>> from backquant.graph import register_quantized_decomposed
    >>> register_quantized_decomposed()
    >>> def f(x):
    ...     y = torch.ops.quantized_decomposed.dequantize_per_tensor.default(x, 0.1, 0, 0, 9, torch.uint8)
    ...     z = y.relu_()
    ...     return y * z
    >>> traced = fx.symbolic_trace(f)
    >>> read_results(traced.graph, traced)
    >>> [node.args for node in traced.graph.nodes if node.name == "mul"]
    [(relu_, relu_)]
    """
    position = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        changed = _changed(node, modules)
        if changed is None:
            continue
        for user in list(changed.users):
            if position[user] > position[node]:
                user.replace_input_with(changed, node)


def _changed(node: fx.Node, modules: nn.Module) -> fx.Node | None:
    """The dequantized value that a call changes in place and returns."""
    first = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(first, fx.Node) or not is_dequantize(first):
        return None
    called = modules.get_submodule(str(node.target)) if node.op == "call_module" else None
    return first if changes_argument(node, called) else None


# Signed activations on engines whose kernels take unsigned ones: integers and zero points plus 128.
#
# ``(integer - zero_point) * scale`` is the same number when both integer and zero point are larger by 128. So
# what is int8 between a quantize node and its dequantize nodes is uint8 there instead: equal bit for bit.

_SHIFT = 128


def as_unsigned(graph: fx.Graph, engine: EngineInfo, separate: Collection[str]) -> None:
    """Rewrite ``graph`` where it stands. What ``separate`` names, and what else reads integers, keep int8.

    >>> from backquant.graph import register_quantized_decomposed
    >>> from backquant.lower.engine import engine_info
    >>> register_quantized_decomposed()
    >>> ops = torch.ops.quantized_decomposed
    >>> def f(x):
    ...     q = ops.quantize_per_tensor.default(x, 0.5, -3, -128, 127, torch.int8)
    ...     return ops.dequantize_per_tensor.default(q, 0.5, -3, -128, 127, torch.int8)
    >>> traced = fx.symbolic_trace(f)
    >>> as_unsigned(traced.graph, engine_info("x86"), ())
    >>> [node.args[1:] for node in traced.graph.nodes if node.op == "call_function"]
    [(0.5, 125, 0, 255, torch.uint8), (0.5, 125, 0, 255, torch.uint8)]
    """
    if torch.int8 in engine.activation_dtypes or torch.uint8 not in engine.activation_dtypes:
        return
    for node in graph.nodes:
        if not is_quantize(node) or qparams_of(node).dtype != torch.int8:
            continue
        both = (node, *node.users)
        if not any(one.name in separate for one in both) and all(map(is_dequantize, node.users)):
            for one in both:
                one.args = (one.args[0], *_shifted(qparams_of(one)).literals)


def _shifted(signed: QParams) -> QParams:
    return replace(
        signed,
        zero_point=signed.zero_point + _SHIFT,
        quant_min=signed.quant_min + _SHIFT,
        quant_max=signed.quant_max + _SHIFT,
        dtype=torch.uint8,
    )
