"""The first half of every flow: capture, plan the fusions, fuse, plan the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from backquant.backend_config import BackendConfig
from backquant.errors import CaptureError, first_line
from backquant.fuse import (
    apply_fusion,
    decompose_attention,
    plan_fused,
    scaled_by_sample,
    separate_recurrent_layers,
    without_sync,
)
from backquant.fuse.apply import Fused
from backquant.graph import (
    Captured,
    as_arguments,
    get_module,
    released,
    shallow_copy,
    without_parametrizations,
)
from backquant.graph.clone import with_own_state
from backquant.graph.costs import GraphCosts, costs_and_outputs
from backquant.graph.hooks import weight_hooks
from backquant.graph.interception import Draws
from backquant.graph.shapes import GraphValues
from backquant.match import (
    CustomMatching,
    DefaultRules,
    Plan,
    Reason,
    make_plan,
    plan_fusion,
)
from backquant.match.default_rules import (
    Choice,
    Draft,
    is_like_default,
    rules_between_floats,
    rules_for_places,
)
from backquant.match.plan import BySample
from backquant.operators.equivalents import mapping_for_export
from backquant.operators.index import find, find_root
from backquant.pipeline.by_sample import rules_before_scaling, scaled_note
from backquant.pipeline.capture import (
    Capturing,
    captured_with,
    exported,
    exported_instead,
    first_sentence,
    is_exported,
    spelled_for,
    with_reasons,
)
from backquant.pipeline.faithful import require_same
from backquant.prepare import Record, Request
from backquant.qconfig import PrepareCustomConfig, QConfigMapping

# A trace or an export: which of two plans puts more multiply-adds on integers.
#
# A trace keeps some calls whole that an export takes apart: functions that ``torch.fx.wrap`` names,
# attention as a function, layers with hooks. Only where such calls hold multiply-adds is there anything to
# choose, and only then is the model exported.


_LEAST = 0.01  # of all multiply-adds, in calls that an export might take apart


def kept_whole(module: fx.GraphModule, plan: Plan, named: CustomMatching) -> list[fx.Node]:
    """The calls that stay float because the trace keeps them whole (layers, wrapped functions), in order.

    Modules that the user asked to leave whole, or to quantize on their own, are not among them.
    """
    return [
        node
        for node in _unknown(module, named)
        if node.name not in plan.decisions or not plan.decisions[node.name].quantized
    ]


def _unknown(module: fx.GraphModule, named: CustomMatching) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if node.op == "call_module":
            called = get_module(module, str(node.target))
            if (
                find_root(type(called)) is None
                and str(node.target) not in named.untraced_names
                and type(called) not in named.untraced_classes
                and next(called.parameters(), None) is not None
            ):
                yield node
        elif (
            node.op == "call_function" and find(node.target) is None and not _is_plain(node.target)
        ):
            yield node


def _is_plain(function: object) -> bool:
    """Operators of Python and of ATen: an export has the same ones."""
    return getattr(function, "__module__", None) in ("_operator", "builtins", "torch._ops", "math")


def worth_an_export(costs: Mapping[str, int], kept: list[fx.Node]) -> bool:
    """Whether calls that were kept whole hold a share of the multiply-adds that counts.

    >>> x, linear, helper, output = fx.symbolic_trace(lambda x: (x @ x) + 1).graph.nodes
    >>> worth_an_export({linear.name: 90, helper.name: 10}, [helper])
    True
    >>> worth_an_export({linear.name: 90}, [helper])
    False
    """
    return sum(costs.get(node.name, 0) for node in kept) > _LEAST * sum(costs.values())


def on_integers(plan: Plan, costs: Mapping[str, int]) -> int:
    """Multiply-adds of what ``plan`` quantizes."""
    decisions = plan.decisions
    return sum(n for name, n in costs.items() if name in decisions and decisions[name].quantized)


def described(module: fx.GraphModule, node: fx.Node) -> str:
    """A call for a note.

    >>> gm = fx.symbolic_trace(lambda x: x + 1)
    >>> described(gm, list(gm.graph.nodes)[1])
    "the function 'add'"
    """
    if node.op == "call_module":
        return f"{node.target!r} ({type(get_module(module, str(node.target))).__name__})"
    return f"the function {getattr(node.target, '__name__', node.target)!r}"


# Multiply-adds of each operator, counted in one run of the captured graph; the run also shows that it
# works.


def costs_of(
    module: fx.GraphModule, example_inputs: Any, origin: str = "symbolic trace"
) -> tuple[GraphCosts, Any]:
    """Multiply-adds of the nodes of ``module`` on inputs that the model accepts, their kinds of values, and
    what the graph returns for them.

    Raises ``CaptureError`` when the graph fails on them: the capture, of which ``origin`` is the name, took
    another way through ``forward`` than a call does (``if mask is None:`` is decided while tracing, where
    ``mask`` is a stand-in; models ask whether they are exported).

    >>> import torch
    >>> module = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3)))
    >>> costs_of(module, torch.zeros(1, 2))[0].multiply_adds
    {'_0': 6}
    """
    try:
        with with_own_state(module):
            return costs_and_outputs(module, example_inputs)
    except Exception as error:
        reason = first_line(error)
        if origin == "torch.export":
            raise _of_export(module, reason, str(error)) from error
        where, fix = _advice(left_out(module, example_inputs), str(error))
        raise CaptureError(
            f"the traced model fails on inputs that the model accepts: {reason}",
            where=where,
            fix=fix,
        ) from error


_NODE = re.compile(r"While executing %(\w+)")


def _of_export(module: fx.GraphModule, reason: str, words: str) -> CaptureError:
    found = _NODE.search(words)
    nodes = {node.name: node for node in module.graph.nodes} if found else {}
    node = nodes.get(found[1]) if found else None
    where = "forward" if node is None else f"node {node.name!r}, {node.target}"
    if "vmap" in words:
        return CaptureError(
            "the exported model reads a value from inside of a function that torch.vmap maps, as a constant",
            where=where,
            fix="write what torch.vmap maps with broadcasting, f(a[:, None], b[None]), or go part by part,\n"
            "with what each is called with: model.set_submodule(path, backquant.quantize(part, ...))",
        )
    return CaptureError(
        f"the exported model fails on inputs that the model accepts: {reason}",
        where=where,
        fix="the model does something else while it is exported (torch.compiler.is_exporting), such as\n"
        "making a mask that a call leaves out: quantize a module whose forward calls its parts as a\n"
        "call does, self.model.encoder(self.model.embeddings(input_ids))",
    )


def _advice(names: list[str], words: str) -> tuple[str, str]:
    """Where the trace went wrong, and what to do: arguments that were left out are the likeliest cause."""
    if names:
        return (
            f"arguments that were left out: {', '.join(names)}",
            "tracing decides about branches on arguments (if mask is None) once, for any value:\n"
            "wrap the model in a module whose forward takes just the arguments that you pass",
        )
    node = _NODE.search(words)
    return (
        f"node {node[1]!r} of the trace" if node else "forward",
        "a symbolic trace records one way through forward, for all values and sizes:\n"
        'capture="export", or leave the part out:\n'
        "PrepareCustomConfig().set_non_traceable_module_names([...])  # it stays in float",
    )


def left_out(module: fx.GraphModule, example_inputs: Any) -> list[str]:
    """Arguments that are ``None`` where nobody passes them, and that ``example_inputs`` does not give.

    >>> left_out(fx.symbolic_trace(lambda x, mask=None: x), 1)
    ['mask']
    """
    if example_inputs is None:
        return []
    args, kwargs = as_arguments(example_inputs)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [
        str(node.target)
        for node in placeholders[len(args) :]
        if node.args and node.args[0] is None and str(node.target) not in kwargs
    ]


class Choices(NamedTuple):
    """What is chosen beyond a request that is like the backend's default: further rules, one choice after the
    other, and the layers whose inputs are scaled sample by sample, by the name of their node."""

    rules: tuple[Choice, ...] = ()
    by_sample: Callable[[Draft], dict[str, BySample]] = lambda _: {}


_NONE = Choices()


class Planned(NamedTuple):
    """A fused graph and its record, with the decision about each operator; nothing is observed yet."""

    module: fx.GraphModule
    record: Record

    def noted(self, *notes: str) -> Planned:
        """The same with notes in the plan."""
        return self._replace(record=replace(self.record, plan=self.record.plan.noted(*notes)))


def fused_graph(model: nn.Module, backend: BackendConfig) -> fx.GraphModule:
    """Capture ``model`` and fuse what the backend fuses for inference. The model is not changed."""
    captured = captured_with(None, model)
    without_sync(captured.module)
    fusions = plan_fusion(captured.module, backend)
    return apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat=False).module


def planned(
    model: nn.Module,
    request: Request,
    capturing: Capturing | None = None,
    choices: Choices = _NONE,
) -> Planned:
    """The fused graph of ``model`` and the plan for it; see ``plan_fused`` for what is not fused.

    ``capturing.own``: what the backend leaves in float by default is left there (``DefaultRules``), and
    ``choices`` are made, too, for what no rule of a mapping that somebody passed names, where it asks for the
    rest as the backend does.
    ``capturing.decompose``: the graph is run on the example inputs, once, for its costs. Where a trace works
    and keeps whole what holds multiply-adds, the model is exported, too, and the plan that puts more of
    them on integers is taken.

    Raises ``CaptureError`` as ``captured_with`` and ``costs_of``.
    """
    if capturing is not None and capturing.decompose:
        capturing = replace(
            capturing,
            whole_classes=named_by(request.backend_config, "module"),
            whole_functions=named_by(request.backend_config, "function"),
            named=_requested_by_type(request.qconfig_mapping, capturing),
        )
    captured = captured_with(request.custom, model, capturing)
    made = _plan_of(captured, request, capturing, choices)
    if capturing is None or capturing.example_inputs is None:
        return made
    is_open = capturing.how == "auto" and not is_exported(captured)
    if not capturing.decompose and not (
        is_open and left_out(made.module, capturing.example_inputs)
    ):
        return made
    failure: CaptureError | None = None
    try:
        made = _counted(made, model, capturing, captured)
    except CaptureError as error:
        # a trace takes one way for all values, and decides about arguments that are left out as if given
        if not is_open:
            raise
        failure = error
    if failure is not None:  # behind the handler, as in ``captured_with``
        again = exported_instead(request.custom, model, capturing, failure)
        return _counted(_plan_of(again, request, capturing, choices), model, capturing, again)
    if not (is_open and capturing.decompose):
        return made
    return _better(made, model, request, capturing, choices)


def _counted(made: Planned, model: nn.Module, capturing: Capturing, captured: Captured) -> Planned:
    """With what a run on the example inputs shows. Raises ``CaptureError`` where the graph fails on them, or
    gives other values than ``model``."""
    inputs, origin = capturing.example_inputs, captured.origin
    with Draws() as draws:
        costs, outputs = costs_of(made.module, inputs, origin)
    same = require_same(model, inputs, outputs, draws.found, origin, capturing.called)
    made = made.noted(*same.notes)
    return made._replace(record=replace(made.record, costs=replace(costs, total=same.total)))


def named_by(backend: BackendConfig, kind: str) -> frozenset[Any]:
    """The classes of modules, or the functions, that entries of a backend name: none is taken apart."""

    def named(backend: BackendConfig) -> frozenset[Any]:
        nodes = (node for pattern in backend.shared_entries for node in pattern.nodes)
        return frozenset(node.op for node in nodes if node.kind == kind)

    return backend.derived((named_by, kind), named)


def _requested_by_type(mapping: QConfigMapping, capturing: Capturing) -> frozenset[Any]:
    """The operators that a request names which somebody passed."""
    if any(mapping is own for own in capturing.own or ()):
        return frozenset()
    by_place = (key[1] for key in mapping.module_name_object_type_order_qconfigs)
    return frozenset((*mapping.object_type_qconfigs, *by_place))


@dataclass
class _Planner:
    """A captured model on the way to its plan: the request as it stands, and the plan that follows from it.

    Each choice may change the mapping; the plan is then made again, until no choice changes it. Two choices
    change the graph, too: layers that are separated, and inputs that are scaled sample by sample.
    """

    captured: Captured
    backend: BackendConfig
    mapping: QConfigMapping
    custom: CustomMatching
    by_default: DefaultRules | None
    capturing: Capturing | None
    notes: tuple[str, ...] = ()
    reasons: dict[str, Reason] = field(default_factory=dict)
    separate_layers: tuple[str, ...] = ()
    by_sample: Mapping[str, BySample] = field(default_factory=dict)

    def read(self) -> None:
        """Plan the graph, which is new: its shapes are measured when a condition asks for them."""
        module, free = self.captured.module, self.captured.free
        self.values = (
            GraphValues(None)
            if self.capturing is None
            else GraphValues(module, self.capturing.example_inputs, free)
        )
        self.fit()

    def fit(self) -> None:
        """Plan the graph for the mapping."""
        request = self.captured, self.backend, self.mapping, self.custom
        self.fused, self.plan = plan_fused(*request, self.values, self.by_default)
        self._draft: Draft | None = None

    @property
    def draft(self) -> Draft:
        """What a choice is made by."""
        assert self.by_default is not None
        if self._draft is None:
            of = self.fused.module, self.fused.scopes, self.plan, self.backend, self.mapping
            self._draft = Draft(*of, self.by_default)
        return self._draft

    def settle(self, choices: Sequence[Choice]) -> None:
        """Make one choice after the other; what is chosen after a separation of layers counts them."""
        for choose in choices:
            chosen = choose(self.draft)
            if chosen is not None and chosen.separate_layers:
                self.separate(chosen.separate_layers)
                chosen = choose(self.draft)
            if chosen is not None:
                self.mapping = chosen.mapping
                self.notes += chosen.notes
                self.reasons |= chosen.reasons
                self.fit()

    def separate(self, layers: tuple[str, ...]) -> None:
        """Decide recurrent layers that are stacked in one module one by one."""
        separate_recurrent_layers(self.captured, layers)
        self.read()
        self.notes += (f"decided layer by layer: {', '.join(layers)}",)
        self.separate_layers += layers

    def scale(self, layers: Mapping[str, BySample], choices: Sequence[Choice]) -> None:
        """Scale the inputs of ``layers``, and begin again: choices count operators, and there are more."""
        paths = scaled_by_sample(self.captured, layers)
        self.notes, self.reasons, self.by_sample = (), {}, layers
        if self.separate_layers:
            self.notes = (f"decided layer by layer: {', '.join(self.separate_layers)}",)
        self.read()
        first, *others = choices
        self.settle((first, partial(rules_before_scaling, layers=layers), *others))
        self.notes += (scaled_note(paths),)

    def planned(self, custom: PrepareCustomConfig | None) -> Planned:
        """The plan with all that was chosen."""
        plan = self.plan.explain(self.reasons).noted(*self.notes)
        plan = replace(plan, separate_layers=self.separate_layers, by_sample=self.by_sample)
        plan = with_reasons(plan, self.captured)
        released(self.captured.module)
        values = self.values.renamed({fusion.root: fusion.anchor for fusion in plan.fusions})
        return _planned(self.fused, plan, Request(self.backend, self.mapping, custom), values)


def _planned(fused: Fused, plan: Plan, request: Request, values: GraphValues) -> Planned:
    of = plan, request.backend_config, request.qconfig_mapping, request.custom
    record = Record(*of, fused.scopes, fused.provenance, values.seen())
    return Planned(fused.module, record)


def _plan_of(
    captured: Captured, request: Request, capturing: Capturing | None, choices: Choices
) -> Planned:
    """What a captured model is planned to be, with all choices where the request is like the default."""
    without_sync(captured.module)
    backend, mapping = spelled_for(captured, request)
    decompose_attention(
        captured, backend, mapping, None if capturing is None else capturing.example_inputs
    )
    own = () if capturing is None else capturing.own or ()
    by_default = None
    if own:
        spelled = tuple(map(mapping_for_export, own)) if is_exported(captured) else own
        rules = () if backend.defaults is None else backend.defaults.leave_float
        by_default = DefaultRules.of(rules, mapping, spelled)
    custom = CustomMatching.of(request.custom)
    planner = _Planner(captured, backend, mapping, custom, by_default, capturing)
    planner.read()
    if by_default is not None:
        like_default = is_like_default(request.qconfig_mapping, own)
        more = (rules_between_floats, *choices.rules) if like_default else ()
        planner.settle((rules_for_places, *more))
        if like_default and (layers := choices.by_sample(planner.draft)):
            planner.mapping = mapping
            planner.scale(layers, (rules_for_places, *more))
    return planner.planned(request.custom)


def _better(
    made: Planned, model: nn.Module, request: Request, capturing: Capturing, choices: Choices
) -> Planned:
    """``made`` of a trace, or the plan of an export where that puts more on integers."""
    plan, counted = made.record.plan, made.record.costs
    kept = kept_whole(made.module, plan, CustomMatching.of(request.custom))
    costs = {} if counted is None else counted.multiply_adds
    if not kept or not worth_an_export(costs, kept):
        return made
    largest = described(made.module, max(kept, key=lambda node: costs.get(node.name, 0)))
    try:
        captured = exported(request.custom, model, capturing)
        other = _plan_of(captured, request, capturing, choices)
        other = _counted(other, model, capturing, captured)
    except CaptureError as error:
        why = first_sentence(error)
        return made.noted(f"{largest} stays float as a whole: it cannot be exported ({why})")
    after = other.record
    assert after.costs is not None
    if on_integers(after.plan, after.costs.multiply_adds) <= on_integers(plan, costs):
        return made
    note = f"captured by torch.export; a symbolic trace keeps {largest} whole, in float"
    noted = replace(after.plan, notes=(note, *after.plan.notes[1:]))
    return other._replace(record=replace(after, plan=noted))


def decided(
    fused: Fused,
    request: Request,
    example_inputs: Any = None,
    by_default: DefaultRules | None = None,
) -> Planned:
    """A fused graph with the plan for it.

    ``example_inputs`` show shapes and dtypes: fake quantize modules take floats only. ``by_default``: what
    stays float where the mapping names no place.
    """
    values = GraphValues(fused.module, example_inputs).run()
    plan = make_plan(
        fused.module,
        fused.scopes,
        request.backend_config,
        request.qconfig_mapping,
        fusions=fused.fusions,
        custom=CustomMatching.of(request.custom),
        values=values,
        by_default=by_default,
    )
    return _planned(fused, plan, request, values)


def in_evaluation(model: nn.Module) -> nn.Module:
    """``model`` where it is what ``evaluation_copy`` would hold, else such a copy: to look at, not to change.

    >>> model = nn.Dropout()
    >>> in_evaluation(model) is model, in_evaluation(model.eval()) is model
    (False, True)
    """
    differs = any(
        part.training or is_parametrized(part) or weight_hooks(part) for part in model.modules()
    )
    return evaluation_copy(model) if differs else model


def evaluation_copy(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode that shares the tensors; the model keeps its training flags. Parameters that
    are computed (``torch.nn.utils.parametrize``, old weight norm, pruning) are what they are computed to be.

    >>> model = nn.Dropout()
    >>> evaluation_copy(model).training, model.training
    (False, True)
    >>> evaluation_copy(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    return without_parametrizations(shallow_copy(model).eval())
