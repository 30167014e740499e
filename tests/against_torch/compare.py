"""One random model on one backend: every step of ours beside PyTorch's.

1. Capture and fusion: names, classes, matched nodes.
2. Prepare: the graph with its observers, which of them are one, their classes.
3. Convert: the reference graph, in whose code the qparams are literals, and its outputs, bit by bit.
4. Lower: outputs beside PyTorch's lowered model's, and each kernel beside the reference model.

Where ours differs on purpose, the model has to be equal under PyTorch's rules (``torch_rules``), or
hold one of the fusions that PyTorch gets wrong (``fusion_causes``). Anything else is unexplained.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx

from against_torch.fusion_causes import fusion_causes
from against_torch.graphs import RandomModel, batches
from against_torch.kernels import KernelCheck, check_kernels
from against_torch.operations import FUNCTIONAL
from against_torch.oracle import BACKENDS, Backend, pattern_key, torch_matches
from against_torch.torch_rules import FAILS, IN_PLACE, TorchPlacement
from against_torch.torch_side import quietly
from backquant.api import convert_fx, convert_to_reference_fx, prepare_fx
from backquant.backend_config.pattern import to_reversed
from backquant.fuse import apply_fusion
from backquant.graph import capture
from backquant.match import Plan, make_plan, plan_fusion
from backquant.prepare import PreparedModule, prepared_state
from backquant.runtime import QuantizedModel

__all__ = ["UNDEQUANTIZED", "Comparison", "Lowered", "compare"]

UNDEQUANTIZED = "the lowered model fails: a result that is read in float, too, is left in integers"
_ONE = 1.001  # one integer step, computed in float32


@dataclass(frozen=True)
class Lowered:
    """Largest distances of outputs in their integer steps: of ours from PyTorch's lowered model, and of
    each from the reference model, which is one.

    ``joined``: how many of our kernels compute two operators and round once, where the reference model
    rounds twice. Each is within one step of it (``Comparison.kernels``); later operators may widen that.
    ``coarser``: the largest ratio between the step of a value and that of an output computed from it; one
    step of the former is so many of the latter.
    """

    between: float
    ours: float
    theirs: float
    joined: int = 0
    coarser: float = 1.0

    @property
    def kind(self) -> str:
        if self.between == 0:
            return "bit-equal"
        if self.between <= _ONE:
            return "one step"
        if self.ours <= _ONE:
            return "PyTorch's leaves the reference model"
        if self.coarser > 1 and self.ours <= self.coarser + _ONE:
            both = self.theirs <= self.coarser + _ONE
            return "one step of a coarser scale" if both else "PyTorch's leaves the reference model"
        if self.joined and self.ours <= 4 * self.joined:
            return "operators joined in one kernel round once"
        return "ours leaves the reference model" if self.theirs <= _ONE else "both leave it"


@dataclass
class Comparison:
    """What came of one model on one backend.

    ``verdict``: ``equal``, ``explained`` (by ``causes``), or ``unexplained`` (see ``detail``).
    ``kernels`` compares each of our kernels with the reference model, ``lowered`` whole models.
    """

    seed: int
    backend: str
    verdict: str = "equal"
    causes: tuple[str, ...] = ()
    detail: str = ""
    kernels: KernelCheck = field(default_factory=KernelCheck)
    lowered: Lowered | None = None


class Difference(Exception):
    """Something is not equal; the message says what."""


def compare(seed: int, backend_name: str) -> Comparison:
    """Run the four steps; an exception on our side is a difference without a cause."""
    result = Comparison(seed, backend_name)
    try:
        _Run(seed, BACKENDS[backend_name], result).run()
    except Difference as difference:
        result.verdict, result.detail = "unexplained", str(difference)
    except Exception:
        result.verdict, result.detail = "unexplained", traceback.format_exc(limit=-4)
    return result


class _Run:
    def __init__(self, seed: int, backend: Backend, result: Comparison) -> None:
        self.backend = backend
        self.result = result
        self.model = RandomModel(seed)
        self.batches = batches(self.model, seed)

    def run(self) -> None:
        try:
            causes = self._compare_matches()
        except Difference:
            if not _is_changed_in_place(self.model):
                raise
            causes = {IN_PLACE}
        if causes:
            self._explained(causes)
            self._check_alone()
            return
        with torch.no_grad(), quietly():
            try:
                theirs = self.backend.torch_prepare(self.model, self.batches[0])
            except AttributeError:
                if FAILS not in self._placed_by_torch_rules()[1]:
                    raise
                self._explained({FAILS})
                self._check_alone()
                return
            ours = self._prepare()
            if _differs(ours, theirs):
                same = self._under_torch_rules(theirs)
                self._compare_references(same, theirs)
                self._check_alone(ours)
                return
            self._compare_references(ours, theirs)
            self._compare_lowered(ours, theirs)

    def _explained(self, causes: Iterable[str]) -> None:
        self.result.verdict, self.result.causes = "explained", tuple(sorted(causes))

    # -- step 1 ------------------------------------------------------------------------------------

    def _compare_matches(self) -> set[str]:
        """Fusions that PyTorch gets wrong; without any, everything up to the matches is equal."""
        backend = self.backend.ours
        captured = capture(self.model)
        fusions = plan_fusion(captured.module, backend)
        causes = fusion_causes(captured.module, fusions, self.backend.name)
        if causes:
            return causes
        expected = torch_matches(self.model, self.backend.theirs)
        _same("captured names", _names(captured.module), expected.captured_names)
        fused = apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat=False)
        _same("names after fusion", _names(fused.module), expected.fused_names)
        modules = dict(fused.module.named_modules(remove_duplicate=False))
        calls = [node for node in fused.module.graph.nodes if node.op == "call_module"]
        types = {node.name: pattern_key(type(modules[node.target])) for node in calls}
        _same("classes after fusion", types, expected.fused_types)
        plan = make_plan(
            fused.module, fused.scopes, backend, self.backend.mapping(), fusions=fusions
        )
        entries = list(backend.entries)
        matched = {
            name: (match.anchor, pattern_key(to_reversed(entries[match.entry])))
            for match in plan.matches
            for name in match.nodes
        }
        _same("matches", matched, expected.matches)
        return set()

    # -- step 2 ------------------------------------------------------------------------------------

    def _prepare(self) -> PreparedModule:
        example = self.batches[0].clone()
        return prepare_fx(
            self.model, self.backend.mapping(), example, backend_config=self.backend.ours
        )

    def _placed_by_torch_rules(self) -> tuple[PreparedModule, set[str]]:
        """Our prepared model under PyTorch's rules, and those that matter."""
        made: list[TorchPlacement] = []

        def place(*arguments: Any) -> TorchPlacement:
            made.append(TorchPlacement(*arguments))
            return made[-1]

        unchecked = mock.patch("backquant.prepare.insert.check_groups", lambda *_: None)
        placed = mock.patch("backquant.prepare.placement.Placement", place)
        changed = {IN_PLACE} if _is_changed_in_place(self.model) else set()
        with placed, unchecked, _as_traced():
            return self._prepare(), made[-1].causes | changed

    def _under_torch_rules(self, theirs: fx.GraphModule) -> PreparedModule:
        """Our prepared model under PyTorch's rules, which is PyTorch's; notes the rules that matter."""
        ours, causes = self._placed_by_torch_rules()
        difference = _differs(ours, theirs)
        if difference or not causes:
            raise Difference(f"under PyTorch's rules, {sorted(causes)}: {difference}")
        self._explained(causes)
        return ours

    # -- steps 3 and 4 -----------------------------------------------------------------------------

    def _compare_references(self, ours: fx.GraphModule, theirs: fx.GraphModule) -> None:
        for batch in self.batches:
            ours(batch.clone())
            theirs(batch.clone())
        observed = set(theirs.meta["_observed_graph_module_attrs"].observed_node_names)
        _same("quantized nodes", _as_torch_counts(prepared_state(ours).plan), observed)
        expected = self.backend.torch_reference(theirs)
        self.reference = convert_to_reference_fx(ours, dialect="decomposed")
        _same("qparams", _qparams(self.reference), _qparams(expected))
        if not any(isinstance(part, FUNCTIONAL) for part in self.model.parts):
            # Weights that are arguments are quantized in PyTorch's graph, and integers in ours.
            _same("code", self.reference.code.splitlines(), expected.code.splitlines())
        for batch in self.batches:
            if _distance(self.reference, expected, batch) > 0:
                raise Difference("the outputs of the reference models differ")

    def _compare_lowered(self, ours: fx.GraphModule, theirs: fx.GraphModule) -> None:
        lowered, expected = convert_fx(ours), self.backend.torch_lowered(theirs)
        self._check_kernels(lowered)
        scales = _output_scales(self.reference)
        with self.backend.running():
            pairs = {
                "between": (lowered, expected),
                "ours": (lowered, self.reference),
                "theirs": (expected, self.reference),
            }
            try:
                expected(self.batches[0].clone())
            except RuntimeError:
                if not _read_both_ways(self.reference):
                    raise
                self._explained({UNDEQUANTIZED})
                return
            self.result.lowered = Lowered(
                **{
                    name: max(_distance(one, two, batch, scales) for batch in self.batches)
                    for name, (one, two) in pairs.items()
                },
                joined=sum("rounds once" in use.kernel for use in lowered.kernels),
                coarser=_coarser(self.reference),
            )

    def _check_alone(self, prepared: fx.GraphModule | None = None) -> None:
        """Where PyTorch is no measure: the reference model is near the model, the kernels near it."""
        with torch.no_grad(), quietly():
            prepared = self._prepare() if prepared is None else prepared
            for batch in self.batches:
                prepared(batch.clone())
            self.reference = convert_to_reference_fx(prepared, dialect="decomposed")
            self._check_kernels(convert_fx(prepared))

    def _check_kernels(self, lowered: QuantizedModel) -> None:
        self.result.kernels = check_kernels(self.reference, lowered, self.batches[0])
        if self.result.kernels.worst > 1:
            raise Difference(f"a kernel is far from the reference model: {self.result.kernels}")


@contextmanager
def _as_traced() -> Iterator[None]:
    """Captures in which later readers of what is changed in place read what was there before."""
    capturing = "backquant.graph.capture"
    unread = mock.patch(f"{capturing}.read_changed_values", lambda *_: None)
    with unread, mock.patch(f"{capturing}.lost_change", lambda *_: ""):
        yield


def _is_changed_in_place(model: torch.nn.Module) -> bool:
    ours = capture(model)
    with _as_traced():
        plain = capture(model)
    return bool(ours.lost_change) or str(ours.module.graph) != str(plain.module.graph)


def _names(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes]


def _same(what: str, ours: Any, theirs: Any) -> None:
    if ours == theirs:
        return
    if isinstance(ours, dict):
        ours, theirs = set(ours.items()), set(theirs.items())
    elif isinstance(ours, list):
        ours, theirs = set(ours), set(theirs)
    raise Difference(f"{what}: ours {sorted(ours - theirs)}, PyTorch's {sorted(theirs - ours)}")


def _differs(ours: fx.GraphModule, theirs: fx.GraphModule) -> str:
    """What differs between prepared models; empty when nothing does."""
    if ours.code != theirs.code:
        return "the graphs with observers differ"
    if _observers(ours) != _observers(theirs):
        return "other observers are shared, or of another class"
    return ""


def _observers(prepared: fx.GraphModule) -> list[tuple[str, str, str]]:
    """(observer, the first that it is one with, its class), in graph order."""
    names = [str(node.target) for node in prepared.graph.nodes if node.op == "call_module"]
    modules = [(n, getattr(prepared, n)) for n in names if n.startswith("activation_post_process")]
    first: dict[int, str] = {}
    return [(name, first.setdefault(id(m), name), type(m).__name__) for name, m in modules]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = tuple(value.values())
    found = list(value) if isinstance(value, tuple) else [value]
    # PyTorch's lowering leaves some outputs quantized that its reference model gives in float32.
    return [tensor.dequantize() if tensor.is_quantized else tensor for tensor in found]


def _as_torch_counts(plan: Plan) -> set[str]:
    """Quantized nodes, and those that found no qparams to share: PyTorch counts them."""
    return {
        name
        for name, decision in plan.decisions.items()
        if decision.quantized or any(r.rule == "nothing-to-share" for r in decision.reasons)
    }


def _qparams(reference: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Quantized value and qparams of each activation, in graph order."""
    return [
        (str(node.args[0]), *node.args[1:])
        for node in reference.graph.nodes
        if str(node.target).startswith("quantized_decomposed.quantize_per_tensor")
        and node.args[0].op != "get_attr"
    ]


def _distance(
    one: Callable[[torch.Tensor], Any],
    two: Callable[[torch.Tensor], Any],
    batch: torch.Tensor,
    scales: Sequence[float] = (),
) -> float:
    """The largest distance between the outputs of two models, divided by the scale of the output."""
    worst = 0.0
    first, second = _tensors(one(batch.clone())), _tensors(two(batch.clone()))
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        if not torch.equal(a, b):
            worst = max(worst, float((a - b).abs().max()) / (scales[i] if scales else 1.0))
    return worst


def _output_scales(reference: fx.GraphModule) -> list[float]:
    """The integer step of each output; 1 for those that are float in the reference model."""
    returned = reference.graph.output_node().args[0]
    values = list(returned.values()) if isinstance(returned, dict) else returned
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    return [_scale(value) for value in values]


def _read_both_ways(reference: fx.GraphModule) -> bool:
    """Whether a result between dequantize and quantize nodes is also read in float."""
    for node in reference.graph.nodes:
        kinds = {"quantized_decomposed.quantize" in str(user.target) for user in node.users}
        if len(kinds) == 2 and any(map(_is_dequantize, node.all_input_nodes)):
            return True
    return False


def _coarser(reference: fx.GraphModule) -> float:
    """The largest ratio between the step of a value and that of an output computed from it."""
    worst: dict[fx.Node, float] = {}
    for node in reference.graph.nodes:
        behind = [worst[value] for value in node.all_input_nodes]
        worst[node] = max([_scale(node) if _is_dequantize(node) else 0.0, *behind])
    outputs = reference.graph.output_node().all_input_nodes
    return max([1.0, *(worst[v] / _scale(v) for v in outputs if _is_dequantize(v))])


def _is_dequantize(value: Any) -> bool:
    return str(getattr(value, "target", "")).startswith("quantized_decomposed.dequantize")


def _scale(value: Any) -> float:
    has_step = _is_dequantize(value) and isinstance(value.args[1], float)
    return float(value.args[1]) if has_step else 1.0
