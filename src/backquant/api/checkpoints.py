"""Checkpoints of language models: from a Hugging Face folder, or from a quantized model, to one that is
served.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backquant.accuracy.recipes import Recipe, recipe_of
from backquant.api.one_call import quantize
from backquant.backend_config import get_backend_config
from backquant.calibrate.feed import ProgressBar
from backquant.deploy.checkpoints.formats import FORMATS, find_format
from backquant.deploy.checkpoints.gguf import write_gguf
from backquant.deploy.checkpoints.gguf_blocks import blocks_of
from backquant.deploy.checkpoints.gguf_read import GgufSource
from backquant.deploy.checkpoints.layer import Activation, Scheme, layer_of, quantized_layers
from backquant.deploy.checkpoints.read import (
    HubFolder,
    QuantizedCheckpoint,
    Source,
)
from backquant.deploy.checkpoints.target import IGNORE, SOURCE, CheckpointTarget
from backquant.deploy.checkpoints.write import (
    Contents,
    check_folder,
    contents_of,
    write_checkpoint,
)
from backquant.deploy.exported import Exported
from backquant.deploy.job_of import Reference, reference_of
from backquant.deploy.target import check_installed, check_place, find_target, target_named
from backquant.errors import CoverageError, UsageError
from backquant.pipeline.checkpoint_layers import (
    FLOAT_OUTPUT,
    PlannedLayers,
    activation_observer,
    check_admitted,
    float_model,
    planned_layers,
    reasons,
)
from backquant.pipeline.mappings import weights_by_path
from backquant.qconfig import QConfig, QConfigMapping

_ACTIVATIONS = ("int8", "float8_e4m3fn")
_AHEAD = ":ahead"


@dataclass(frozen=True)
class CheckpointReport:
    """What was written: ``schemes`` of the quantized layers by path, ``left`` the layers that stay
    float with the
    code of the reason, ``bytes_before`` and ``bytes_after`` of the files with tensors."""

    path: Path
    target: str
    schemes: Mapping[str, Scheme]
    left: Mapping[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        counts = Counter(str(scheme) for scheme in self.schemes.values())
        words = [f"{count} layers {text}" for text, count in counts.items()]
        words += [f"{name} stays float: {why}" for name, why in list(self.left.items())[:6]]
        more = len(self.left) - 6
        words += [f"and {more} more"] if more > 0 else []
        sizes = f"{self.bytes_before / 1e6:.1f} MB → {self.bytes_after / 1e6:.1f} MB"
        return "\n".join([f"{self.path}: {self.target}, {sizes}", *(f"  {line}" for line in words)])

    def to_dict(self) -> dict[str, Any]:
        """As data that JSON can hold."""
        return {
            **vars(self),
            "path": str(self.path),
            "schemes": {path: str(scheme) for path, scheme in self.schemes.items()},
            "left": dict(self.left),
        }


def quantize_checkpoint(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: str,
    weights: str | Mapping[str, str | None],
    group_size: int | None = None,
    activations: str | None = None,
    ignore: Sequence[str] = ("lm_head",),
    calibration: Iterable[Any] | None = None,
    recipe: str | os.PathLike[str] | Sequence[str] = "default",
    overwrite: bool = False,
    progress: bool = False,
) -> CheckpointReport:
    """Quantize a language model from its files to a checkpoint that a server opens.

    Without data weights are read layer by layer, rounded to nearest, and written shard by shard, so a
    model may be larger
    than memory. A run that was broken off goes on where it was.

    Args:
        folder: as ``save_pretrained`` writes it: ``config.json``, safetensors files, a tokenizer.
        output: the folder (of GGUF the file) to write; it is there when all of it is.
        to: a format: ``"compressed-tensors"``, ….
        weights, group_size: as in ``quantize``, also ``"int4:128"``; layers by path in a mapping.
        activations: ``"int8"`` or ``"float8_e4m3fn"``: quantized at each call, for each token;
            ``"int8:ahead"``, ``"float8_e4m3fn:ahead"``: with one scale for each layer, measured on
            ``calibration``. Default: float.
        ignore: patterns of layers that stay float.
        calibration: batches of token ids (tensors, or dicts with ``input_ids``), on which ``recipe``
        makes the
            weights better; the model is then made in memory, in float32. Default: none, rounded to nearest.
        recipe: as in ``quantize``, without the steps that add operators or biases.
        overwrite: replace ``output``.
        progress: a progress bar on standard error.

    Raises:
        UsageError: an argument, or a folder, of the wrong kind; weights that the format does not have.
        ArtifactError: files that are damaged, missing, or contradict ``config.json``.
        CoverageError: no layer can be quantized so.
        ExportError: ``output`` cannot be written, or the disk has no room for it.
        MissingExtraError: transformers, or what the format needs, is not installed.

    >>> quantize_checkpoint("nowhere", "served", to="compressed-tensors", weights="int4:128")
    Traceback (most recent call last):
    backquant.errors.UsageError: there is no folder nowhere
      where  nowhere
      fix    the folder that model.save_pretrained(folder) wrote, or a download of one
    """
    place = Path(output)
    target = checkpoint_target(to, place)
    _check_place(target, place, overwrite)
    source = HubFolder.of(folder)
    config = get_backend_config(target.backend)
    asked: Mapping[str, str | None] = {"": weights} if isinstance(weights, str) else weights

    if activations == "float8_e4m3fn" and calibration is not None:
        raise UsageError(
            "activations in float8 at each call are not simulated, so no recipe is judged with them",
            where=f"activations={activations!r}, with data",
            fix=f"activations='float8_e4m3fn{_AHEAD}', or no data",
        )
    if str(activations).endswith(_AHEAD) and calibration is None:
        raise UsageError(
            "scales of activations that are known ahead are measured on data",
            where=f"activations={activations!r}",
            fix="calibration=[{'input_ids': ids}, ...], or activations='int8': at each call",
        )

    def request(layers: nn.Module) -> QConfigMapping:
        mapping = weights_by_path(config, asked, group_size, layers)
        if activations is not None:
            mapping = _with_activations(mapping, activations)
        for path, _ in layers.named_modules():
            if any(fnmatch(path, pattern) for pattern in ignore):
                mapping.set_module_name(path, None)
        return mapping

    if calibration is not None:
        model = float_model(source)
        quantized = quantize(
            model,
            backend=config,
            calibration=[{**_named(batch), "use_cache": False} for batch in calibration],
            qconfig_mapping=request(model),
            recipe=_on_weights(recipe),
            progress=progress,
        )
        export_checkpoint(
            reference_of(quantized, target), place, target, {SOURCE: folder}, overwrite=overwrite
        )
        schemes = {path: layer_of(path, m).scheme for path, m in quantized_layers(quantized)}
        return _report(source, place, target, schemes, {})
    planned = planned_layers(source, config, request)
    _check_some(planned, source)
    contents = Contents(
        planned.schemes,
        planned.layer,
        planned.left,
        scale_dtype=planned.scale_dtype,
        resumable=f"{asked} {group_size} {activations}",
    )
    with ProgressBar("writing", quiet=not progress) as bar:
        _write(source, contents, target, place, overwrite, bar)
    left = {path: reason.rule for path, reason in reasons(planned)}
    return _report(source, place, target, planned.schemes, left)


def _report(
    source: HubFolder,
    place: Path,
    target: CheckpointTarget,
    schemes: Mapping[str, Scheme],
    left: Mapping[str, str],
) -> CheckpointReport:
    files = list(place.glob("*.safetensors")) if place.is_dir() else [place]
    before = sum((source.place / file).stat().st_size for file in source.shards)
    after = sum(file.stat().st_size for file in files)
    return CheckpointReport(place, target.name, schemes, left, before, after)


def _on_weights(recipe: str | os.PathLike[str] | Sequence[str]) -> Recipe:
    """The recipe without what adds operators or biases. Raises ``UsageError`` for steps that were named."""
    found = recipe_of(recipe)
    kept = found.on_weights()
    named = [] if isinstance(recipe, str | os.PathLike) else list(found.steps)
    for step in named:
        if step not in kept.steps:
            raise UsageError(
                f"the step {step!r} adds operators or biases, for which a checkpoint has no place",
                where="recipe",
                fix=f"recipe={list(kept.steps) or ['gptq']!r}",
            )
    return kept


def _named(batch: Any) -> Mapping[str, Any]:
    """A batch as keyword arguments: token ids come first."""
    if isinstance(batch, Mapping):
        return batch
    return {"input_ids": batch[0] if isinstance(batch, tuple | list) else batch}


def export_checkpoint(
    quantized: QuantizedCheckpoint | Reference,
    place: Path,
    target: CheckpointTarget,
    options: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> Exported:
    """``export`` to a checkpoint format: of a reference graph, or of a checkpoint in another format.

    Raises ``UsageError`` where the folder of the float model is not named, ``ExportError`` for layers
    that the
    format does not hold.
    """
    _check_place(target, place, overwrite)
    check_installed(target)
    source: Source
    given = options or {}
    if isinstance(quantized, QuantizedCheckpoint):
        source = quantized = quantized.handed_on(given.get(IGNORE, ()), given.get(SOURCE))
        _check_told(quantized, target)
        dtype = quantized.scale_dtype
        contents = Contents(quantized.schemes, quantized.layer, quantized.left, scale_dtype=dtype)
    else:
        source = _float_folder(given, target)
        contents = contents_of(
            quantized.module, quantized.plan, quantized.config, source, target.name
        )
    check_admitted(contents.schemes, source.sizes, get_backend_config(target.backend), target.name)
    if isinstance(quantized, QuantizedCheckpoint):
        _check_exact(contents, target)
    files = _write(source, contents, target, place, overwrite)
    count = len(contents.schemes)
    return Exported(
        place,
        target.name,
        target.name,
        expected=count,
        integer=count,
        integer_share=1.0,
        files=tuple(files),
        means="in the checkpoint",
    )


def _check_told(quantized: QuantizedCheckpoint, target: CheckpointTarget) -> None:
    """Raise ``UsageError`` for a GGUF file that does not say all of the model, and no folder that does."""
    source = quantized.source
    lost = source.lost if isinstance(source, GgufSource) and quantized.beside is None else ""
    if lost:
        raise UsageError(
            f"{source.place} does not say what config.json has to: {lost}",
            where=f"to={target.name!r}",
            fix='options={"source": folder}   # of the float model',
        )


def _check_exact(contents: Contents, target: CheckpointTarget) -> None:
    """Raise ``ExportError`` where a format cannot store what a layer has, before anything is written."""
    form = None if target.suffixes else find_format(target.name)
    if form is not None:
        form.config(contents.schemes, contents.left)
    for path in contents.schemes:
        layer = contents.make(path)
        if form is None:
            blocks_of(layer)
        else:
            form.tensors(replace(layer, scale=layer.scale.to(contents.scale_dtype)))


def _write(
    source: Source,
    contents: Contents,
    target: CheckpointTarget,
    place: Path,
    overwrite: bool,
    progress: ProgressBar | None = None,
) -> list[Path]:
    if target.suffixes:
        return write_gguf(source, contents, place, progress)
    form = find_format(target.name)
    return write_checkpoint(source, contents, form, place, overwrite=overwrite, progress=progress)


def _check_place(target: CheckpointTarget, place: Path, overwrite: bool) -> None:
    check = check_place if target.suffixes else check_folder
    check(place, overwrite)


def _float_folder(options: Mapping[str, Any], target: CheckpointTarget) -> HubFolder:
    folder = options.get(SOURCE)
    if folder is None:
        raise UsageError(
            "a checkpoint takes its configuration and tokenizer from the folder of the float model",
            where=f"to={target.name!r}",
            fix='options={"source": folder}, from which the model came: from_pretrained(folder)',
        )
    return HubFolder.of(folder)


def checkpoint_target(to: str, place: Path) -> CheckpointTarget:
    """The target ``to``, if it is a format of checkpoints and can be used here.

    Raises ``UsageError``, and ``MissingExtraError`` where a package is missing.
    """
    if not isinstance(target_named(to), CheckpointTarget):
        known = [*FORMATS, "gguf"]
        raise UsageError(
            f"{to} is no format of checkpoints",
            where=f"to={to!r}",
            fix=f"one of {', '.join(known)}",
        )
    target = find_target(to, place)
    assert isinstance(target, CheckpointTarget)  # as the one of that name
    check_installed(target)
    return target


def _with_activations(mapping: QConfigMapping, activations: str) -> QConfigMapping:
    dtype = activations.removesuffix(_AHEAD)
    if dtype not in _ACTIVATIONS:
        raise UsageError(
            f"activations are not quantized to {activations!r} here",
            where="activations",
            fix=f"one of {', '.join((*_ACTIVATIONS, *(f'{one}{_AHEAD}' for one in _ACTIVATIONS)))}",
        )
    given = Activation(dtype, scale=torch.ones(())) if dtype != activations else None
    observer = activation_observer(given or Activation(dtype, per_token=True))
    for kind, qconfig in list(mapping.object_type_qconfigs.items()):
        mapping.set_object_type(kind, QConfig(observer, qconfig.weight, output=FLOAT_OUTPUT))
    for path, qconfig in list(mapping.module_name_qconfigs.items()):
        if qconfig is not None:
            mapping.set_module_name(path, QConfig(observer, qconfig.weight, output=FLOAT_OUTPUT))
    return mapping


def _check_some(planned: PlannedLayers, source: HubFolder) -> None:
    if planned.schemes:
        return
    path, why = next(reasons(planned), ("", None))
    raise CoverageError(
        f"no layer of {source.place} can be quantized so",
        where=""
        if why is None
        else f"{path}: {why.rule}, requested {why.asked}, supported {why.admitted}",
        fix="" if why is None else why.fix,
    )
