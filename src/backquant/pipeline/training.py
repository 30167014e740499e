"""Quantization-aware training: fake quantize modules where calibration has observers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import fx, nn

from backquant.backend_config import BackendConfig
from backquant.errors import CaptureError
from backquant.fuse import apply_fusion, put_back, without_sync
from backquant.fuse.apply import Fused
from backquant.graph import (
    Captured,
    CapturedForTraining,
    DeferredGraphModule,
    GraphRewriter,
    capture_for_training,
    own_tensors,
    rebuilt,
)
from backquant.graph.capture import largest_part
from backquant.graph.clone import shallow_copy
from backquant.graph.example_call import ExampleCall
from backquant.graph.grouped import grouped_linear
from backquant.graph.modes import ONLY_IN_MODE
from backquant.graph.shapes import GraphValues
from backquant.match import DefaultRules, plan_fusion
from backquant.observe import is_fake_quantize, is_placeholder
from backquant.operators.grouped import grouped_product_to_train
from backquant.pipeline.capture import (
    Capturing,
    captured_with,
    said_to_fail,
    traced_with_example,
    with_state_whole,
)
from backquant.pipeline.faithful import agrees
from backquant.pipeline.plan import Planned, decided, in_evaluation, named_by
from backquant.pipeline.prepare import observed, with_standalone_modules
from backquant.prepare import PreparedModule, Request, swap_for_training
from backquant.qconfig import (
    PrepareCustomConfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)

_SHOWN = 10
_MOST_KINDS = 4


class FusedForTraining(NamedTuple):
    """A model that is captured and fused for training.

    ``difference``: what else the model does in the other mode. ``made_plain``: the synchronized batch norms
    that stand as plain ones, and are to be put back. ``notes``: what a user should know of the capture.
    """

    fused: Fused
    difference: str
    notes: tuple[str, ...]
    made_plain: dict[nn.Module, nn.SyncBatchNorm]


def fused_for_training(
    model: nn.Module,
    backend: BackendConfig,
    custom: PrepareCustomConfig | None,
    called: ExampleCall | None = None,
) -> FusedForTraining:
    """``model`` captured in both modes, and fused with its batch norms. Raises as ``prepare_qat_fx``.

    ``called``: what the model does with the example inputs in evaluation mode; ``None``: there are none.

    >>> from backquant.backend_config import get_backend_config
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> graph = fused_for_training(model, get_backend_config("x86"), None)
    >>> type(graph.fused.module.get_submodule("0")).__name__, graph.difference
    ('LinearReLU', '')
    """
    if called is not None:
        custom = with_state_whole(custom, model, called)
    try:
        captured, difference = _captured(model, custom, called)
    except CaptureError as error:
        error.fix = _left_whole(error, model, custom, called)
        raise
    if grouped_linear in named_by(backend, "function"):
        GraphRewriter(captured.module, captured.scopes).apply(grouped_product_to_train)
    made_plain = without_sync(captured.module)
    values = GraphValues(captured.module, None if called is None else called.inputs)
    fusions = plan_fusion(captured.module, backend, is_qat=True, values=values)
    fused = apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat=True)
    return FusedForTraining(fused, difference, captured.notes, made_plain)


def _left_whole(
    error: CaptureError,
    model: nn.Module,
    custom: PrepareCustomConfig | None,
    called: ExampleCall | None,
) -> str:
    """The fix for ``error``: code that names the classes of modules without which ``model`` is captured.

    The experts of a mixture stand in every layer, and an error names the first.
    """
    asked, failure = copy.deepcopy(custom) or PrepareCustomConfig(), error
    given = list(asked.non_traceable_module_classes)
    parts: dict[type, str] = {}
    while failure.part and len(parts) < _MOST_KINDS:
        parts.setdefault(type(model.get_submodule(failure.part)), failure.part)
        if not _has_layers(model, tuple(parts)):
            return f"part by part; the largest is model.get_submodule({largest_part(model)!r})"
        try:
            _captured(model, asked.set_non_traceable_module_classes([*given, *parts]), called)
        except CaptureError as other:
            failure = other
        else:
            return _naming(model, parts)
    return error.fix


def _has_layers(model: nn.Module, whole: tuple[type, ...]) -> bool:
    """Whether ``model`` has layers outside of modules of the classes ``whole``."""
    if isinstance(model, whole):
        return False
    is_layer = not isinstance(model, (nn.Embedding, nn.EmbeddingBag))
    own = is_layer and any(each.dim() > 1 for each in model.parameters(recurse=False))
    return own or any(_has_layers(part, whole) for part in model.children())


def _naming(model: nn.Module, parts: Mapping[type, str]) -> str:
    alike = sum(type(module) in parts for module in model.modules())
    if alike == len(parts):
        call = f"names({list(parts.values())!r})"
    else:
        kinds = ", ".join(f"type(model.get_submodule({path!r}))" for path in parts.values())
        call = f"classes([{kinds}])"
    it = "it stays" if alike == 1 else "they stay"
    return f"PrepareCustomConfig().set_non_traceable_module_{call}  # {it} in float"


def _captured(
    model: nn.Module, custom: PrepareCustomConfig | None, called: ExampleCall | None
) -> CapturedForTraining:
    """A trace as PyTorch's; where that fails, or does something else than the model, one that may ask for the
    sizes and flags of the example inputs."""
    try:
        plain = capture_for_training(model, partial(captured_with, custom))
        if called is None or plain.difference or _agrees(plain.captured, model, called):
            return plain
        why = "gives other values than the model"
    except CaptureError as error:
        if called is None:
            raise
        plain, why = None, said_to_fail(error)
    how = partial(traced_with_example, custom, Capturing("trace", called.inputs), why)
    try:
        made = capture_for_training(model, how, called.inputs)
    except CaptureError as error:
        if plain is not None:
            return plain
        instead = _as_in_evaluation(model, how, called, error)
        if instead is None:
            raise
        return instead
    return made if plain is None or _agrees(made.captured, model, called) else plain


def _as_in_evaluation(
    model: nn.Module, how: Callable[[nn.Module], Captured], called: ExampleCall, error: CaptureError
) -> CapturedForTraining | None:
    """The graph of evaluation for both modes: what draws masks in Python, in training alone (SpecAugment),
    cannot be recorded. Modules (dropout, batch norms) follow the mode all the same."""
    if not model.training:
        return None
    try:
        captured = capture_for_training(shallow_copy(model).eval(), how, called.inputs).captured
    except CaptureError:
        return None
    modes = {path: part.training for path, part in model.named_modules(remove_duplicate=False)}
    for path, part in captured.module.named_modules(remove_duplicate=False):
        part.training = modes.get(path, True)
    why = f"in training mode {error.what} ({error.where})"
    return CapturedForTraining(captured, f"{ONLY_IN_MODE.format('evaluation')}: {why}")


def _agrees(captured: Captured, model: nn.Module, called: ExampleCall) -> bool:
    """Whether the graph gives in evaluation what the model gives, as far as one call shows."""
    frozen = shallow_copy(captured.module).eval()
    assert isinstance(frozen, fx.GraphModule)
    return agrees(frozen, in_evaluation(model), called.inputs, called)


def fuse_for_training(
    model: nn.Module, backend: BackendConfig, custom: PrepareCustomConfig
) -> fx.GraphModule:
    """A copy of ``model`` with fused modules that still have their batch norms.

    >>> from backquant.backend_config import get_backend_config
    >>> model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    >>> fused = fuse_for_training(model, get_backend_config("x86"), PrepareCustomConfig())
    >>> type(fused.get_submodule("0")).__name__
    'ConvBn2d'
    """
    graph = fused_for_training(model, backend, custom)
    module = graph.fused.module
    put_back(module, graph.made_plain)
    return rebuilt(DeferredGraphModule, module, own_tensors(module))


def prepared_for_training(
    graph: FusedForTraining,
    request: Request,
    example: Any = None,
    noted: Callable[[Planned], Planned] = lambda step: step,
) -> PreparedModule:
    """The plan for ``graph`` carried out: QAT modules for those with weights, fake quantize modules.
    ``noted``: what else is to be said of the plan.

    >>> from backquant.backend_config import get_backend_config
    >>> from backquant.qconfig import get_default_qat_qconfig_mapping
    >>> request = Request(get_backend_config("x86"), get_default_qat_qconfig_mapping("x86"))
    >>> graph = fused_for_training(nn.Sequential(nn.Linear(2, 2)), request.backend_config, None)
    >>> type(prepared_for_training(graph, request).get_submodule("0")).__module__
    'backquant.nn.qat.linear'
    """
    by_default = _left_in_float(request)
    step = noted(decided(graph.fused, request, example, by_default).noted(*graph.notes))
    put_back(step.module, graph.made_plain)
    step = with_standalone_modules(step, request, _standalone)
    backend, mapping = request.backend_config, request.qconfig_mapping
    trained = swap_for_training(step.module, step.record.plan, backend, mapping)
    return observed(step._replace(module=trained), by_default.rules)


def _left_in_float(request: Request) -> DefaultRules:
    """What the backend leaves in float by default, where ``request`` names no place."""
    backend, mapping = request.backend_config, request.qconfig_mapping
    if backend.defaults is None or not backend.defaults.leave_float:
        return DefaultRules(())
    own = [get_default_qconfig_mapping(backend)]
    if backend.defaults.qat_activation is not None:
        own += [get_default_qat_qconfig_mapping(backend, version) for version in (0, 1)]
    rules = DefaultRules.of(backend.defaults.leave_float, mapping, own)
    return replace(rules, in_training=True)


def _standalone(model: nn.Module, request: Request) -> PreparedModule:
    return prepared_for_training(
        fused_for_training(model, request.backend_config, request.custom), request
    )


def unrounded(prepared: PreparedModule, backend: str) -> str:
    """The modules whose weight is only measured, because the QConfig makes observers."""
    trained = (
        (path, getattr(module, "weight_fake_quant", None))
        for path, module in prepared.named_modules()
    )
    names = [
        path
        for path, measures in trained
        if measures is not None and not (is_fake_quantize(measures) or is_placeholder(measures))
    ]
    if not names:
        return ""
    more = f", … ({len(names)} in all)" if len(names) > _SHOWN else ""
    return (
        f"{', '.join(names[:_SHOWN])}{more} train without rounding: their QConfig makes observers, "
        f"not fake quantize modules\n  fix    get_default_qat_qconfig_mapping({backend!r})"
    )
