"""Checkpoints of language models: from a Hugging Face folder, or from a quantized model, to one that is
served.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import nn

from backquant.backend_config import get_backend_config
from backquant.calibrate.progress import ProgressBar
from backquant.deploy.checkpoints.formats import FORMATS, find_format
from backquant.deploy.checkpoints.hub_folder import HubFolder
from backquant.deploy.checkpoints.layer import Activation, Scheme
from backquant.deploy.checkpoints.of_model import contents_of
from backquant.deploy.checkpoints.read import QuantizedCheckpoint, open_checkpoint
from backquant.deploy.checkpoints.target import SOURCE, CheckpointTarget
from backquant.deploy.checkpoints.write import Contents, Source, check_folder, write_checkpoint
from backquant.deploy.exported import Exported
from backquant.deploy.job_of import Reference
from backquant.deploy.target import check_installed, find_target
from backquant.errors import CoverageError, UsageError
from backquant.pipeline.checkpoint_layers import (
    PlannedLayers,
    activation_observer,
    check_admitted,
    planned_layers,
    reasons,
)
from backquant.pipeline.weight_only import weights_by_path
from backquant.qconfig import QConfig, QConfigMapping

_ACTIVATIONS = ("int8", "float8_e4m3fn")


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


# size: the two folders, and one keyword per independent choice of the user
def quantize_checkpoint(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: str,
    weights: str | Mapping[str, str | None],
    group_size: int | None = None,
    activations: str | None = None,
    ignore: Sequence[str] = ("lm_head",),
    overwrite: bool = False,
    progress: bool = False,
) -> CheckpointReport:
    """Quantize a language model from its files to a checkpoint that a server opens, without data.

    Weights are read layer by layer, rounded to nearest, and written shard by shard, so a model may be larger
    than memory. A run that was broken off goes on where it was.

    Args:
        folder: as ``save_pretrained`` writes it: ``config.json``, safetensors files, a tokenizer.
        output: the folder (of GGUF the file) to write; it is there when all of it is.
        to: a format: ``"compressed-tensors"``, ….
        weights, group_size: as in ``quantize``, also ``"int4:128"``; layers by path in a mapping.
        activations: ``"int8"`` or ``"float8_e4m3fn"``: quantized at each call, for each token. Default:
        float.
        ignore: patterns of layers that stay float.
        overwrite: replace ``output``.
        progress: a progress bar on standard error.

    Raises:
        UsageError: an argument, or a folder, of the wrong kind; weights that the format does not have.
        ArtifactError: files that are damaged, missing, or contradict ``config.json``.
        CoverageError: no layer can be quantized so.
        ExportError: ``output`` cannot be written, or the disk has no room for it.
        MissingExtraError: transformers, or what the format needs, is not installed.

    >>> quantize_checkpoint("nowhere", "out", to="compressed-tensors", weights="int4:128")
    Traceback (most recent call last):
    backquant.errors.UsageError: there is no folder nowhere
      where  nowhere
      fix    the folder that model.save_pretrained(folder) wrote, or a download of one
    """
    place = Path(output)
    target = checkpoint_target(to, place)
    check_folder(place, overwrite)
    source = HubFolder.of(folder)
    config = get_backend_config(target.backend)
    asked: Mapping[str, str | None] = {"": weights} if isinstance(weights, str) else weights

    def request(layers: nn.Module) -> QConfigMapping:
        mapping = weights_by_path(config, asked, group_size, layers)
        if activations is not None:
            mapping = _with_activations(mapping, activations)
        for path, _ in layers.named_modules():
            if any(fnmatch(path, pattern) for pattern in ignore):
                mapping.set_module_name(path, None)
        return mapping

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
        files = write_checkpoint(
            source, contents, find_format(to), place, overwrite=overwrite, progress=bar
        )
    return CheckpointReport(
        place,
        to,
        planned.schemes,
        {path: reason.rule for path, reason in reasons(planned)},
        sum((source.place / file).stat().st_size for file in source.shards),
        sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".gguf")),
    )


def load_checkpoint(folder: str | os.PathLike[str]) -> QuantizedCheckpoint:
    """Read a quantized checkpoint, of ours or of another tool: its integers, bit for bit.

    ``layer(path)`` of the result is one layer; ``export(checkpoint, folder, to=...)`` writes it in another
    format, where no integer changes.

    Raises:
        UsageError: the folder is none, or in a format that is not read.
        ArtifactError: its tensors and its configuration contradict each other.

    >>> load_checkpoint("nowhere")
    Traceback (most recent call last):
    backquant.errors.UsageError: there is no folder nowhere
      where  nowhere
      fix    the folder that model.save_pretrained(folder) wrote, or a download of one
    """
    return open_checkpoint(folder)


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
    check_folder(place, overwrite)
    check_installed(target)
    source: Source
    if isinstance(quantized, QuantizedCheckpoint):
        source = quantized
        dtype = quantized.scale_dtype
        contents = Contents(quantized.schemes, quantized.layer, quantized.left, scale_dtype=dtype)
    else:
        source = _float_folder(options or {}, target)
        contents = contents_of(*quantized, source, target.name)
    check_admitted(contents.schemes, source.sizes, get_backend_config(target.backend), target.name)
    files = write_checkpoint(source, contents, find_format(target.name), place, overwrite=overwrite)
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
    """The target ``to``, if it is a format of checkpoints and can be used here; else ``UsageError``."""
    target = find_target(to, place)
    if not isinstance(target, CheckpointTarget):
        known = [*FORMATS]
        raise UsageError(
            f"{to} is no format of checkpoints",
            where=f"to={to!r}",
            fix=f"one of {', '.join(known)}",
        )
    check_installed(target)
    return target


def _with_activations(mapping: QConfigMapping, activations: str) -> QConfigMapping:
    if activations not in _ACTIVATIONS:
        raise UsageError(
            f"activations are not quantized to {activations!r} here",
            where="activations",
            fix=f"one of {', '.join(_ACTIVATIONS)}",
        )
    observer = activation_observer(Activation(activations, per_token=True))
    for kind, qconfig in list(mapping.object_type_qconfigs.items()):
        mapping.set_object_type(kind, QConfig(observer, qconfig.weight))
    for path, qconfig in list(mapping.module_name_qconfigs.items()):
        if qconfig is not None:
            mapping.set_module_name(path, QConfig(observer, qconfig.weight))
    return mapping


def _check_some(planned: PlannedLayers, source: HubFolder) -> None:
    if planned.schemes:
        return
    path, why = next(reasons(planned), ("", None))
    raise CoverageError(
        f"no layer of {source.place} can be quantized so",
        where=""
        if why is None
        else f"{path}: {why.rule}, asked {why.asked}, admitted {why.admitted}",
        fix="" if why is None else why.fix,
    )
