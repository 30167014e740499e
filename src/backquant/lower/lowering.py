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
from backquant.dtypes import QParams, plain_dtype
from backquant.errors import PassError
from backquant.graph import (
    DeferredGraphModule,
    assemble,
    call_before,
    contract,
    copied_graph,
    get_module,
    graph_pass,
    reshape_views,
    run_pass,
    verify,
)
from backquant.graph.folding import is_random
from backquant.graph.in_place import changes_argument
from backquant.lower.contracts import boundaries_are_folded, reference_modules_are_lowered
from backquant.lower.fuse_followers import fuse_attention, fuse_followers, fuse_shuffles
from backquant.lower.kernels.boundary import (
    dequantize,
    integers_of,
    multiply,
    quantize,
    quantized_tensor,
    requantize,
    saturate,
)
from backquant.lower.kernels.configured import KernelModule
from backquant.lower.kernels.integer.lookup_tables import rescale
from backquant.lower.kernels.packed import PackedKernel
from backquant.lower.machine import EngineInfo
from backquant.lower.padded import pad_before
from backquant.lower.qdq import (
    dequantize_target,
    described_arithmetic,
    integer_source,
    is_dequantize,
    is_described_quantize,
    is_dynamic_boundary,
    is_quantize,
    is_weight_dequantize,
    qparams_of,
    static_cast,
)
from backquant.lower.rule import (
    IDENTITY,
    Emit,
    KernelUse,
    Lowered,
    LowerRule,
    RuleIndex,
    Site,
    index_rules,
    quantizes,
    site_of,
    steps_of,
)
from backquant.match.plan import Reason
from backquant.native.library import ENGINES, is_here
from backquant.operators import moves_values
from backquant.prepare.record import KeptGraphModule
from backquant.reason_codes import ReasonCode

# The last step of a lowering: what is left of quantize and dequantize nodes.
#
# 1. A quantize node on a dequantize node with the same qparams disappears (the round trip is exact).
# 2. With other qparams the two become one ``requantize`` kernel.
# 3. The others become the fast boundary kernels; of an engine that computes as described they stay, and
# rule 2    is done on integers. 4. Dequantize nodes that nothing reads are erased, and what only they read:
# constants, and the nodes of    dynamic quantization. 5. A product with constants that only a quantize node
# reads is made in place where a kernel made the float    value for it alone: a new tensor of that size
# costs more than the product. 6. Where a custom module takes quantized tensors, it gets the integers as
# one, and they are taken out of the    one that it gives.

_KERNELS = (quantize, dequantize, requantize, rescale, quantized_tensor, integers_of)


def is_boundary(node: object) -> bool:
    """Whether ``node`` crosses between float and integers, in the QDQ dialect or lowered."""
    if is_quantize(node) or is_dequantize(node) or is_described_quantize(node):
        return True
    return isinstance(node, Node) and node.op == "call_function" and node.target in _KERNELS


@contract(ensures=[boundaries_are_folded])
def fold_boundaries(graph: Graph, engine: EngineInfo) -> None:
    """Apply the rules above to ``graph``."""
    for node in list(graph.nodes):
        if quantizes(node, engine) and is_dequantize(node.args[0]):
            _join(graph, node, engine)
        elif node.target is torch.quantize_per_tensor and is_dequantize(node.args[0]):
            _pass_integers(node)
        elif is_quantize(node) and node.args[0].target == "dequantize":
            node.target, node.args = integers_of, (node.args[0].args[0], *node.args[1:])
    _erase_unread(graph)
    if engine.as_described:
        return
    for node in graph.nodes:
        if is_quantize(node):
            _multiply_in_place(graph, node.args[0])
            node.target = quantize
        elif is_dequantize(node):
            node.target = dequantize


def _join(graph: Graph, node: Node, engine: EngineInfo) -> None:
    """Rules 1 and 2."""
    before = node.args[0]
    assert isinstance(before, Node)
    source, old, new = integer_source(before), qparams_of(before), qparams_of(node)
    if old == new:
        node.replace_all_uses_with(source)
    else:
        with graph.inserting_before(node):
            args: tuple[Any, ...] = (source, old.scale, old.zero_point, *new.literals)
            if engine.as_described:
                args = (*args, *described_arithmetic(node))
            kernel = rescale if engine.as_described else requantize
            joined = graph.create_node("call_function", kernel, args, {}, node.name)
        node.replace_all_uses_with(joined)
    graph.erase_node(node)


def _multiply_in_place(graph: Graph, product: Any) -> None:
    """Rule 5."""
    if not isinstance(product, Node) or product.target is not operator.mul or product.kwargs:
        return
    value, factors = product.args
    if not isinstance(value, Node) or value.op != "call_module" or len(value.users) > 1:
        return
    is_constant = isinstance(factors, Node) and factors.op == "get_attr"
    root = graph.owning_module
    if not is_constant or len(product.users) > 1 or root is None:
        return
    if isinstance(get_module(root, str(value.target)), PackedKernel):
        product.target = multiply


def _pass_integers(node: Node) -> None:
    """Rule 6, before a custom module."""
    before, scale, zero_point, dtype = node.args
    assert isinstance(before, Node) and isinstance(dtype, torch.dtype)
    own = qparams_of(before)
    if (own.scale, own.zero_point, own.dtype) == (scale, zero_point, plain_dtype(dtype)):
        node.target, node.args = quantized_tensor, (integer_source(before), scale, zero_point)


def _erase_unread(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        constant = node.op == "get_attr" or is_dequantize(node) or is_weight_dequantize(node)
        constant = constant or node.target == "dequantize"
        if not node.users and (constant or is_dynamic_boundary(node)):
            graph.erase_node(node)


# The operators that a lowering left in float, with the reasons.
#
# 1. A node that rules refused: their reasons.
# 2. A node that reads quantized values and has no rule: ``no-kernel``.
# 3. A node that reads float values only: ``float-in-reference``; the plan says why.
# 4. Arithmetic on sizes is no tensor operator and is not listed, nor is taking apart the tuple that a
#    recurrent layer gives.


class FloatFallback:
    """Collects, while the pass runs, what was made and what was refused."""

    def __init__(self, engine: EngineInfo) -> None:
        self.engine = engine
        self._made: set[Node] = set()
        self._refused: dict[Node, list[Reason]] = {}

    def made(self, node: Node) -> None:
        """``node`` was inserted by a rule."""
        self._made.add(node)

    def note(self, node: Node, reasons: list[Reason]) -> None:
        """No rule lowered ``node``; ``reasons`` are those of the rules that were tried."""
        if node in self._made:
            return
        quantized = (is_boundary(n) or is_dynamic_boundary(n) for n in node.all_input_nodes)
        if not reasons and any(quantized):
            reasons = [self._no_kernel(node)]
        self._refused[node] = list(dict.fromkeys(reasons))

    def _no_kernel(self, node: Node) -> Reason:
        return Reason(
            node.name,
            ReasonCode.NO_KERNEL,
            f"an integer kernel for {_spelling(node)}",
            f"engine {self.engine.name} has none",
            place=f"engine {self.engine.name}",
        )

    def reasons(self, graph_module: GraphModule) -> tuple[Reason, ...]:
        """One reason or more for each operator that computes in float, in graph order."""
        found: list[Reason] = []
        sizes: set[Node] = set()
        for node in graph_module.graph.nodes:
            if not node.op.startswith("call_") or node in self._made or is_boundary(node):
                if node in self._made and _reads_size(node):
                    sizes.add(node)
                continue
            if is_weight_dequantize(node) or is_dynamic_boundary(node):
                continue
            if _is_part_of_tuple(graph_module, node):
                continue
            if _reads_size(node) or (_may_be_size(node) and sizes.issuperset(node.all_input_nodes)):
                sizes.add(node)
                continue
            found += self._refused.get(node) or [self.float_in_reference(node)]
        return tuple(found)

    def float_in_reference(self, node: Node) -> Reason:
        """Rule 3, and operators that the mapping leaves in float between quantized ones."""
        return Reason(
            node.name,
            ReasonCode.FLOAT_IN_REFERENCE,
            f"an integer kernel for {_spelling(node)}",
            "integer inputs: the reference model computes it on float values, see the plan",
            place=f"engine {self.engine.name}",
        )


def _is_part_of_tuple(graph_module: GraphModule, node: Node) -> bool:
    source: Any = node
    while isinstance(source, Node) and source.target is operator.getitem:
        source = source.args[0]
    if source is node or not isinstance(source, Node) or source.op != "call_module":
        return False
    module = get_module(graph_module, str(source.target))
    return isinstance(module, (nn.RNNBase, nn.RNNCellBase))


def _reads_size(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "ndimension", "stride")
    return node.target is getattr or node.target is len


def _may_be_size(node: Node) -> bool:
    """Whether the value may be a size: not that of a module, nor random numbers, which are tensors."""
    is_random_function = is_random(getattr(node.target, "__name__", ""))
    return bool(node.all_input_nodes) and node.op != "call_module" and not is_random_function


def _spelling(node: Node) -> str:
    target: Any = node.target
    if node.op == "call_module":
        return f"module {target}"
    if node.op == "call_method":
        return f".{target}()"
    return str(getattr(target, "__name__", target))


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
