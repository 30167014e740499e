"""Language models in files, without making the model: a quantized one is opened; ``explain`` and ``compare``
go layer by layer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from backquant.accuracy.comparison import finite
from backquant.accuracy.figures import decibel_text, decibels
from backquant.api.arguments import refuse_unused
from backquant.backend_config import BackendConfig
from backquant.deploy.checkpoints.gguf_model import architecture_of
from backquant.deploy.checkpoints.gguf_read import open_gguf
from backquant.deploy.checkpoints.layer import Layer
from backquant.deploy.checkpoints.read import HubFolder, QuantizedCheckpoint, open_checkpoint
from backquant.deploy.checkpoints.target import GGUF
from backquant.dtypes import Granularity, find_dtype
from backquant.errors import UsageError, first_line
from backquant.pages import Document, Note, Section, Shown, Table
from backquant.pages.document import Part
from backquant.pipeline.checkpoint_layers import planned_layers, reasons, refused_layers
from backquant.pipeline.mappings import weight_only_mapping
from backquant.qconfig import QConfigMapping

_FEW = 10  # layers that text shows
_ANOTHER = {
    "where": "backquant.compare(float_folder, quantized)",
    "fix": "backquant.compare(float_folder, ...)   # of the float model that was quantized",
}


def load_checkpoint(folder: str | os.PathLike[str]) -> QuantizedCheckpoint:
    """Read a quantized checkpoint, a folder or a GGUF file, of ours or of another tool: its integers, bit for
    bit.

    ``layer(path)`` of the result is one layer; ``export(checkpoint, folder, to=...)`` writes it in another
    format, where no integer changes. Options: ``ignore``, patterns of layers that are written in float;
    ``source``, the folder of the float model, from which ``config.json`` and the tokenizer are taken.

    Raises:
        UsageError: the folder is none, or in a format that is not read.
        ArtifactError: its tensors and its configuration contradict each other.

    >>> load_checkpoint("nowhere")
    Traceback (most recent call last):
    backquant.errors.UsageError: there is no folder nowhere
      where  nowhere
      fix    the folder that model.save_pretrained(folder) wrote, or a download of one
    """
    return open_gguf(folder) if Path(folder).is_file() else open_checkpoint(folder)


@dataclass(frozen=True)
class CheckpointAnswer(Shown):
    """Whether a format holds a model: ``taken``, how each layer is, or would be, quantized; ``refused``: why
    others are not; ``tied``: those that share their weight with an embedding, and are float in any format;
    ``whole``: why it does not hold the model, whatever its layers are.

    >>> print(CheckpointAnswer("served", "gguf", {"fc": "int4 in groups of 32"}, {}))
    gguf takes 1 of 1 layers of served
    """

    path: str
    backend: str
    taken: Mapping[str, str]
    refused: Mapping[str, str]
    tied: tuple[str, ...] = ()
    whole: str = ""

    @property
    def is_taken(self) -> bool:
        """Whether the format refuses nothing."""
        return bool(self.taken) and not self.refused and not self.whole

    def to_dict(self) -> dict[str, Any]:
        """As data that JSON can hold."""
        return asdict(self)

    def document(self) -> Document:
        """Layers that are refused, and those that are taken."""
        lost, kept = list(self.refused.items()), list(self.taken.items())
        held = f"takes {len(kept)} of {len(kept) + len(lost)} layers of {self.path}"
        tables = [("Not quantized there", "why", lost), ("Quantized", "how", kept)]
        parts: list[Part] = [
            Section(title, [Table.of(f"`layer, {head}", rows, _FEW, "more: .to_dict() has all")])
            for title, head, rows in tables
            if rows and (lost or self.whole)
        ]
        shared = (
            f"{', '.join(self.tied)}: float, the weight is the embedding's" if self.tied else ""
        )
        notes = [Note(text) for text in (self.whole, shared) if text]
        headline = f"{self.backend} {f'does not hold {self.path}' if self.whole else held}"
        return Document(self.path, headline, parts=[*notes, *parts], about=f"on {self.backend}")


def explained_folder(
    place: str | os.PathLike[str], config: BackendConfig, mapping: QConfigMapping | None = None
) -> CheckpointAnswer:
    """Whether what ``config`` describes holds the model at ``place``: one that is quantized as it is, a float
    model as ``mapping``, by default the description's own weights, asks.

    Raises ``UsageError`` and ``ArtifactError`` as ``load_checkpoint`` and ``quantize_checkpoint``, for a
    mapping for a model that is quantized already, too.
    """
    path = Path(place)
    source = None if path.is_file() else HubFolder.of(path)
    if source is None or source.quantization:
        refuse_unused(f"{path}, which is quantized already", qconfig_mapping=(mapping, None))
        checkpoint = load_checkpoint(path)
        refused = refused_layers(checkpoint.schemes, checkpoint.sizes, config)
        taken = {p: str(s) for p, s in checkpoint.schemes.items() if p not in refused}
        why = {p: f"{checkpoint.schemes[p]}\n{reason}" for p, reason in refused.items()}
        return CheckpointAnswer(str(path), config.name, taken, why, (), _whole(checkpoint, config))
    asked = _own_weights(config) if mapping is None else mapping
    planned = planned_layers(source, config, lambda _: asked)
    taken = {p: str(scheme) for p, scheme in planned.schemes.items()}
    why = {p: str(reason) for p, reason in reasons(planned)}
    whole = _whole(source, config)
    return CheckpointAnswer(str(path), config.name, taken, why, planned.tied, whole)


def _own_weights(config: BackendConfig) -> QConfigMapping:
    """The weights that a description has as its default."""
    default = None if config.defaults is None else config.defaults.weight
    if default is None or default.dtype is None or config.engine is not None:
        raise UsageError(
            f"{config.name} does not describe files of language models",
            where="backend",
            fix='backend="compressed_tensors"   # or "gguf", "mlx", "gptq", "awq", "torchao"',
        )
    row = find_dtype(default.dtype)
    assert row is not None
    size = Granularity.parse(default.granularity).size if default.granularity else None
    return weight_only_mapping(config, row.name.removeprefix("q"), size)


def _whole(source: HubFolder | QuantizedCheckpoint, config: BackendConfig) -> str:
    """What refuses a model as a whole: GGUF is written for the architectures that have names there."""
    if config.name != GGUF.backend:
        return ""
    try:
        architecture_of(source.config, source.place)
    except UsageError as error:
        return first_line(error)
    return ""


@dataclass(frozen=True)
class LayerError:
    """What a layer lost: SQNR of its weight in dB, and the largest difference of a value."""

    path: str
    scheme: str
    sqnr: float
    largest: float


@dataclass(frozen=True)
class CheckpointComparison(Shown):
    """The weights of a quantized model beside the float ones, the worst first; ``missing``: layers that the
    float model has not."""

    path: str
    rows: tuple[LayerError, ...]
    missing: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As data that JSON can hold; what is infinite (no error at all) is ``None``."""
        data: dict[str, Any] = finite(asdict(self))
        return data

    def document(self) -> Document:
        """The table."""
        cells = [(r.path, r.scheme, decibel_text(r.sqnr), f"{r.largest:.3g}") for r in self.rows]
        heads = "`layer, how, #SQNR of the weight, #largest difference"
        table = Table.of(heads, cells, _FEW, "more have less error: .to_dict() has all")
        worst = f", at worst {decibel_text(self.rows[0].sqnr)}" if self.rows else ""
        lost = f"not in the float model: {', '.join(self.missing)}"
        parts: list[Part] = [table, *([Note(lost)] if self.missing else [])]
        headline = f"{self.path}: {len(self.rows)} quantized layers{worst}"
        return Document(self.path, headline, parts=[Section("The worst first", parts)])


def compared_folders(
    floating: str | os.PathLike[str], quantized: str | os.PathLike[str]
) -> CheckpointComparison:
    """Each quantized weight beside the float one, one in memory at a time. A model whose channels were scaled
    before (AWQ) has other weights, and computes the same: the comparison of outputs is for these.

    Raises ``UsageError`` and ``ArtifactError`` as ``load_checkpoint``; ``UsageError`` where the models have
    no layer of one name in common, or one of another shape, and for a float model that is quantized.
    """
    source, checkpoint = HubFolder.of(floating), load_checkpoint(quantized)
    if source.quantization:
        raise UsageError(f"{source.place} is quantized already: {source.quantization}", **_ANOTHER)
    known = [path for path in checkpoint.schemes if f"{path}.weight" in source.sizes]
    if not known:
        raise UsageError(
            f"{source.place} has no layer of {checkpoint.place}, such as {next(iter(checkpoint.schemes))}",
            **_ANOTHER,
        )
    rows = [_lost(source.read(f"{p}.weight").float(), checkpoint.layer(p), source) for p in known]
    missing = tuple(path for path in checkpoint.schemes if path not in set(known))
    rows.sort(key=lambda row: row.sqnr)
    return CheckpointComparison(str(checkpoint.place), tuple(rows), missing)


def _lost(wanted: Tensor, layer: Layer, source: HubFolder) -> LayerError:
    found = layer.dequantized()
    if found.shape != wanted.shape:
        raise UsageError(
            f"{layer.path} is {list(found.shape)}, and {list(wanted.shape)} in {source.place}",
            **_ANOTHER,
        )
    wrong, power = (found - wanted).double(), wanted.double().square().sum()
    loss = float(wrong.square().sum() / power.clamp(min=1e-300))
    return LayerError(layer.path, str(layer.scheme), decibels(loss), float(wrong.abs().max()))
