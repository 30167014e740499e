"""Weights of a Hugging Face folder, layer by layer: which are quantized and how, by the plan of a
description.

1. The configuration says which layers there are: the model is made on ``meta`` by transformers. Experts that
   it holds as one tensor, and the files as many, are linear layers.
2. A model of these layers alone is planned as any model is, so that the description, the request and the
   reasons are those of ``quantize``.
3. Each weight is read, quantized by the observer of its rule, and handed on.
4. Layers that servers compute as one have one scale of scales (NVFP4): that of the largest weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from backquant.backend_config import BackendConfig, DTypeConfig
from backquant.convert.hardware import produced_dict
from backquant.deploy.checkpoints.layer import (
    FLOAT8_SCALES,
    Activation,
    Layer,
    Scheme,
    layer_of,
)
from backquant.deploy.checkpoints.read import HubFolder
from backquant.dtypes import Granularity, find_dtype, stored_scale
from backquant.dtypes.granularity import unit_of
from backquant.errors import ArtifactError, ExportError, MissingExtraError, UsageError, first_line
from backquant.graph import capture
from backquant.match import Plan
from backquant.match.decide import make_plan
from backquant.match.plan import Reason
from backquant.match.refusal import described_by_node
from backquant.nn.quantized import reference
from backquant.observe import (
    BlockMinMaxObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from backquant.observe.protocol import qparam_dict
from backquant.qconfig import QConfig, QConfigMapping

_EXPERT = re.compile(r"\.experts\.\d+\.")
_WEIGHT = ".weight"
_FEW = 3  # layers that a message names
_NARROW = (torch.float16, torch.bfloat16)
_AS_ONE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
#: What a server's layers give back, however their input is quantized.
FLOAT_OUTPUT = PlaceholderObserver.with_args(dtype=torch.float32)
_REFERENCE = {nn.Linear: reference.Linear, nn.Embedding: reference.Embedding}


@dataclass(frozen=True)
class PlannedLayers:
    """``schemes``: of the layers that are quantized, by path; ``left``: the linear layers that are not,
    with the
    reason. ``layer`` makes one."""

    source: HubFolder
    plan: Plan
    kinds: Mapping[str, type[nn.Module]]
    tied: tuple[str, ...]
    described: Mapping[str, DTypeConfig]
    qconfigs: Mapping[str, QConfig]
    schemes: Mapping[str, Scheme]

    @property
    def left(self) -> tuple[str, ...]:
        """Linear layers that stay float."""
        linear = (path for path, kind in self.kinds.items() if kind is nn.Linear)
        return (*(path for path in linear if path not in self.schemes), *self.tied)

    @property
    def scale_dtype(self) -> torch.dtype:
        """What scales are rounded to before the weights are, floats of 8 bits aside."""
        found = (d.weight_dtype_with_constraints.scale_dtype for d in self.described.values())
        asked = {dtype for dtype in found if dtype not in FLOAT8_SCALES}
        own = self.source.dtype if self.source.dtype in _NARROW else None
        return next((dtype for dtype in asked if dtype is not None), own) or torch.float32

    def layer(self, path: str) -> Layer:
        """Rule 3."""
        weight = self.source.read(f"{path}{_WEIGHT}").to(torch.float32)
        if not bool(torch.isfinite(weight).all()):
            raise ArtifactError(
                f"{path}{_WEIGHT} holds values that are no numbers",
                where=str(self.source.files.files[f"{path}{_WEIGHT}"]),
                fix=f'leave it in float: weights={{"": ..., "{path}": None}}; or copy the file again',
            )
        scheme = self.schemes[path]
        unit = self._unit(path) if scheme.scale_dtype is torch.float8_e4m3fn else None
        qparams = self._qparams(path, weight, unit)
        kind = self.kinds[path]
        rows, columns = weight.shape
        shell: Any = _float_module(kind, rows, columns)
        shell.weight = nn.Parameter(weight, requires_grad=False)
        made: nn.Module = _REFERENCE[kind].from_float(shell, qparams)  # type: ignore[attr-defined]
        return replace(layer_of(path, made, scheme.activation, scheme.scale_dtype), unit=unit)

    def _qparams(self, path: str, weight: Tensor, unit: Tensor | None) -> dict[str, Any]:
        observer = self.qconfigs[path].weight()
        observer(weight)
        demand = self.described[path].weight_dtype_with_constraints
        found = qparam_dict(observer)
        if unit is not None:
            high, scale = float(found["quant_max"]), found["scale"].double()
            return {**found, "scale": stored_scale(scale, demand.scale_dtype, high, unit).float()}
        dtype = demand.scale_dtype if demand.scale_dtype in FLOAT8_SCALES else self.scale_dtype
        return produced_dict(found, replace(demand, scale_dtype=dtype))

    def _unit(self, path: str) -> Tensor:
        """Rule 4."""
        parent, _, name = path.rpartition(".")
        together = next((names for names in _AS_ONE if name in names), (name,))
        paths = [f"{parent}.{other}".lstrip(".") for other in together]
        same = [p for p in paths if str(self.schemes.get(p)) == str(self.schemes[path])]
        largest = max(float(self.source.read(f"{p}{_WEIGHT}").abs().max()) for p in same)
        # no scale of an observer is below its eps, that of a weight of zeros least of all
        scale = max(largest / self.schemes[path].row.high, torch.finfo(torch.float32).eps)
        return unit_of(torch.tensor(scale, dtype=torch.float64))


def planned_layers(
    source: HubFolder,
    config: BackendConfig,
    mapping: Callable[[nn.Module], QConfigMapping],
) -> PlannedLayers:
    """Rules 1 and 2. ``mapping``: the request for a model of these layers.

    Raises ``ArtifactError`` where the configuration and the files contradict each other, ``UsageError``
    for an
    architecture that transformers does not know, or weights that are quantized already.
    """
    if source.quantization:
        raise UsageError(
            f"{source.place} is quantized already: {source.quantization}",
            where=str(source.place),
            fix="the folder of the float model; backquant.load_checkpoint(folder) reads a quantized one",
        )
    kinds, tied = _kinds(source)
    model = _LayersAlone({p: _shape(source.sizes[f"{p}{_WEIGHT}"]) for p in kinds}, kinds)
    request = mapping(model)
    plan, described = _decided(model, config, request)
    qconfigs = {path: _qconfig(request, path, kinds[path]) for path in described}
    schemes = {path: _scheme(described[path], qconfigs[path]) for path in described}
    return PlannedLayers(source, plan, kinds, tied, described, qconfigs, schemes)


def _decided(
    model: _LayersAlone, config: BackendConfig, request: QConfigMapping
) -> tuple[Plan, dict[str, DTypeConfig]]:
    """The plan, and by path what admits each layer that is quantized."""
    captured = capture(model)
    plan = make_plan(captured.module, captured.scopes, config, request)
    by_node = described_by_node(plan, config)
    nodes = {str(n.target): n.name for n in captured.module.graph.nodes if n.op == "call_module"}
    return plan, {path: by_node[node] for path, node in nodes.items() if node in by_node}


def refused_layers(
    schemes: Mapping[str, Scheme], sizes: Mapping[str, Tensor], config: BackendConfig
) -> dict[str, Reason]:
    """The layers that a format does not hold as they are, each with why."""
    shapes = {path: _shape(sizes[f"{path}{_WEIGHT}"]) for path in schemes}
    kinds: dict[str, type[nn.Module]] = {
        path: nn.Embedding if _is_table(path) else nn.Linear for path in schemes
    }
    model = _LayersAlone(shapes, kinds)
    mapping = QConfigMapping()
    for path, scheme in schemes.items():
        mapping.set_module_name(path, _qconfig_of(scheme))
    plan, admitted = _decided(model, config, mapping)
    why = {d.module_path: d.reasons[0] for d in plan.decisions.values() if d.reasons}
    return {path: why[path] for path in schemes if path not in admitted}


def check_admitted(
    schemes: Mapping[str, Scheme], sizes: Mapping[str, Tensor], config: BackendConfig, target: str
) -> None:
    """Raise ``ExportError`` that names the layers which a format does not hold as they are, and why."""
    refused = refused_layers(schemes, sizes, config)
    lost = list(refused)
    if lost:
        why = refused[lost[0]]
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ExportError(
            f"{target} does not hold {lost[0]}{more} as it is: {schemes[lost[0]]}",
            where=f"requested {why.asked}; supported {why.admitted} {why.place}".rstrip(),
            fix=f"options={{'ignore': {lost}}}   # which are written in float"
            if len(lost) <= _FEW
            else f"backquant.quantize(model, ..., backend={config.name!r}), or quantize_checkpoint",
        )


def _is_table(path: str) -> bool:
    return "embed" in path.rpartition(".")[2]


def _qconfig_of(scheme: Scheme) -> QConfig:
    """The request that gives a layer of this scheme."""
    row, given = scheme.row, scheme.activation
    affine = not scheme.symmetric
    channel = torch.per_channel_affine if affine else torch.per_channel_symmetric
    weight: Any = PerChannelMinMaxObserver.with_args(dtype=row.token, qscheme=channel, ch_axis=0)
    if scheme.group_size == 0:
        one = torch.per_tensor_affine if affine else torch.per_tensor_symmetric
        weight = MinMaxObserver.with_args(dtype=row.token, qscheme=one)
    elif scheme.group_size > 0:
        shared = f"per_group(size={scheme.group_size})"
        weight = BlockMinMaxObserver.with_args(dtype=row.token, qscheme=channel, granularity=shared)
    activation: Any = PlaceholderObserver.with_args(dtype=torch.float32)
    if given is not None:
        activation = activation_observer(given)
    return QConfig(activation, weight, output=FLOAT_OUTPUT)


def activation_observer(given: Activation) -> Any:
    """What observes an activation that is quantized so."""
    dtype = getattr(torch, given.dtype)
    if not given.is_dynamic:
        return MinMaxObserver.with_args(dtype=dtype, qscheme=torch.per_tensor_symmetric)
    settings: dict[str, Any] = {"granularity": "per_token"} if given.per_token else {}
    row = find_dtype(dtype)
    if row is not None and row.is_integer:
        settings |= {"quant_min": row.low, "quant_max": row.high}
    return PlaceholderObserver.with_args(dtype=dtype, is_dynamic=True, **settings)


def _shape(size: Tensor) -> tuple[int, int]:
    rows, columns = size.shape
    return rows, columns


class _LayersAlone(nn.Module):
    """The layers of a checkpoint at their paths, on ``meta``, each called by itself."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, int]], kinds: Mapping[str, type[nn.Module]]
    ) -> None:
        super().__init__()
        self.paths = list(kinds)
        for path, kind in kinds.items():
            rows, columns = shapes[path]
            owner: nn.Module = self
            *parents, name = path.split(".")
            for parent in parents:
                if parent not in owner._modules:
                    owner.add_module(parent, nn.Module())
                owner = owner._modules[parent]  # type: ignore[assignment]
            owner.add_module(name, _float_module(kind, rows, columns))

    def forward(self, x: Tensor) -> list[Tensor]:
        """One call of each."""
        modules = dict(self.named_modules())
        return [modules[path](x) for path in self.paths]


def _float_module(kind: type[nn.Module], rows: int, columns: int) -> nn.Module:
    if kind is nn.Embedding:
        return nn.Embedding(rows, columns, device="meta")
    return nn.Linear(columns, rows, bias=False, device="meta")


def _kinds(source: HubFolder) -> tuple[dict[str, type[nn.Module]], tuple[str, ...]]:
    """Rule 1: linear layers and embeddings by path, in the order of the model; and those that the files
    do not
    hold, since they are tied to an embedding."""
    model = _on_meta(source)
    wanted = {path: module for path, module in model.named_modules() if type(module) in _REFERENCE}
    kinds = {p: type(m) for p, m in wanted.items() if f"{p}{_WEIGHT}" in source.sizes}
    tied = tuple(path for path in wanted if path not in kinds and _is_tied(model, path))
    lost = [path for path in wanted if path not in kinds and path not in tied]
    if lost:
        raise ArtifactError(
            f"the files lack {lost[0]}{_WEIGHT}, which a {type(model).__name__} of this config.json has",
            where=str(source.place),
            fix="the config.json that belongs to the files: the same architecture, and as many layers",
        )
    for path in kinds:
        _check_shape(source, path, tuple(wanted[path].weight.shape))
    experts = {
        name.removesuffix(_WEIGHT): nn.Linear
        for name, size in source.sizes.items()
        if _EXPERT.search(name) and name.endswith(_WEIGHT) and size.dim() == 2
    }
    return {**kinds, **experts}, tied


def _is_tied(model: nn.Module, path: str) -> bool:
    """Whether an output layer shares its weight with the embedding, by the configuration."""
    config = getattr(model, "config", None)
    known = tuple(getattr(model, "_tied_weights_keys", None) or ())
    return f"{path}{_WEIGHT}" in known and bool(getattr(config, "tie_word_embeddings", False))


def _check_shape(source: HubFolder, path: str, wanted: tuple[int, ...]) -> None:
    found = tuple(source.sizes[f"{path}{_WEIGHT}"].shape)
    if found != wanted:
        raise ArtifactError(
            f"{path}{_WEIGHT} is {list(found)} in the files, and {list(wanted)} by config.json",
            where=str(source.place),
            fix="the config.json that belongs to the files",
        )


def float_model(source: HubFolder) -> nn.Module:
    """The model of a folder in memory, in float32. Raises as ``planned_layers``."""
    _on_meta(source)
    from transformers import AutoModelForCausalLM

    made: nn.Module = AutoModelForCausalLM.from_pretrained(
        str(source.place), dtype=torch.float32, local_files_only=True
    )
    return made.eval()


def _on_meta(source: HubFolder) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtraError(
            "checkpoints of language models need transformers, which is not installed",
            extra="checkpoints",
            where=str(source.place),
        ) from error
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(str(source.place), local_files_only=True)
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise UsageError(
            f"transformers has no causal language model for {source.place}: {first_line(error)}",
            where=f"architectures {source.config.get('architectures')}",
            fix="a folder of a decoder that transformers.AutoModelForCausalLM knows",
        ) from error
    return model


def _qconfig(request: QConfigMapping, path: str, kind: type[nn.Module]) -> QConfig:
    found = request.module_name_qconfigs.get(path, request.object_type_qconfigs.get(kind))
    assert isinstance(found, QConfig)
    return found


def _scheme(config: DTypeConfig, qconfig: QConfig) -> Scheme:
    observer = qconfig.weight()
    row = find_dtype(observer.dtype)
    assert row is not None
    shared = getattr(observer, "granularity", "")
    size = Granularity.parse(shared).size if shared else None
    per_row = -1 if hasattr(observer, "ch_axis") else 0
    given = find_dtype(config.input_dtype)
    activation = None
    if given is not None and given.is_stored and config.is_dynamic:
        tokens = config.input_dtype_with_constraints.granularity == "per_token"
        activation = Activation(given.name.removeprefix("q"), tokens)
    return Scheme(row.name.removeprefix("q"), size or per_row, activation, scales_of(config))


def scales_of(config: DTypeConfig) -> torch.dtype | None:
    """The dtype of the scales of a weight, if it is a float of 8 bits."""
    dtype = config.weight_dtype_with_constraints.scale_dtype
    return dtype if dtype in FLOAT8_SCALES else None


def reasons(planned: PlannedLayers) -> Iterator[tuple[str, Reason]]:
    """The linear layers that stay float, each with why."""
    for decision in planned.plan.decisions.values():
        kind = planned.kinds.get(decision.module_path)
        if kind is nn.Linear and not decision.quantized and decision.reasons:
            yield decision.module_path, decision.reasons[0]
