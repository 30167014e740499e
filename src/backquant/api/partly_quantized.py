"""A model some parts of which are quantized, and the folder that it is saved in."""

from __future__ import annotations

import math
import os
import shutil
import uuid
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    StringConstraints,
    ValidationError,
    model_validator,
)
from torch import nn

from backquant.api.arguments import given_model
from backquant.artifact import save
from backquant.errors import (
    ArtifactError,
    UsageError,
)
from backquant.graph import get_module, shallow_copy
from backquant.graph.clone import own_in_place
from backquant.graph.edit import set_module
from backquant.json_text import read_json
from backquant.pipeline.loading import load
from backquant.pipeline.plan import evaluation_copy
from backquant.report.document import percent
from backquant.runtime import QuantizedModel

_SHOWN = 12  # reasons


@dataclass(frozen=True)
class PartlyQuantized:
    """A model of the class that it had, with quantized models in place of parts of it; print it to see which.

    ``model``: is called, and has the methods and attributes, as the original. ``parts``: the quantized models
    by their paths in it, each with its own ``report``. ``multiply_adds``: those of each part for the first
    batch; ``total``: of all of the model; ``uncounted``: the operators of which they are not known, which no
    share counts. ``in_float``: why other parts stay float, by path.
    """

    model: nn.Module
    parts: Mapping[str, QuantizedModel]
    multiply_adds: Mapping[str, int]
    total: int
    in_float: Mapping[str, str]
    uncounted: tuple[str, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives, without gradients."""
        with torch.no_grad():
            return self.model(*args, **kwargs)

    @property
    def coverage(self) -> float:
        """The share of the model's multiply-adds that are quantized, 0 to 1; NaN where it has none, or where
        that of a part is not known."""
        shares = {path: part.report.coverage for path, part in self.parts.items()}
        done = sum(self.multiply_adds[path] * share for path, share in shares.items())
        return float(done / self.total) if self.total else math.nan

    def compile(self) -> PartlyQuantized:
        """The same with compiled parts. Raises as ``QuantizedModel.compile``."""
        made = {path: part.compile() for path, part in self.parts.items()}
        return replace(self, model=with_parts(self.model, made), parts=made)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the reports of the parts by path, and what stays float."""
        parts = {
            path: {"multiply_adds": self.multiply_adds[path], "report": part.report.to_dict()}
            for path, part in self.parts.items()
        }
        coverage = None if math.isnan(self.coverage) else self.coverage
        return {
            "coverage": coverage,
            "multiply_adds": self.total,
            "parts": parts,
            "in_float": dict(self.in_float),
            "uncounted": list(self.uncounted),
        }

    def __str__(self) -> str:
        lines = [
            f"{type(self.model).__name__}: {percent(self.coverage)} of the multiply-adds quantized"
        ]
        for path, part in self.parts.items():
            share = self._share(self.multiply_adds[path])
            lines.append(
                f"  {path}: {share} of the model, {percent(part.report.coverage)} of it quantized"
            )
        outside = self.total - sum(self.multiply_adds.values())
        lines.append(f"  outside of these parts: {self._share(outside)}")
        lines += [f"    {path}: {why}" for path, why in list(self.in_float.items())[:_SHOWN]]
        if len(self.in_float) > _SHOWN:
            lines.append(f"    and {len(self.in_float) - _SHOWN} more: .in_float")
        if self.uncounted:
            lines.append(f"  not counted: {', '.join(self.uncounted)}")
        return "\n".join(lines)

    def _share(self, multiply_adds: int) -> str:
        return percent(multiply_adds / self.total if self.total else math.nan)


def with_parts(model: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of ``model``, which shares its tensors, with ``parts`` at their paths, and wherever else the
    modules stand that are there now.

    >>> relu = nn.ReLU()
    >>> with_parts(nn.Sequential(relu, relu), {"0": nn.Tanh()})
    Sequential(
      (0): Tanh()
      (1): Tanh()
    )
    """
    copied = shallow_copy(model)
    places: dict[int, list[str]] = {}
    for path, module in copied.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(path)
    standing = {path: places[id(get_module(copied, path))] for path in parts}
    for path, made in parts.items():
        for place in standing[path]:
            if not lies_within(place, parts):
                set_module(copied, place, made)
    return copied


def lies_within(path: str, others: Container[str]) -> bool:
    """Whether a module stands inside of one of ``others``.

    >>> lies_within("a.b.c", {"a.b"}), lies_within("a.bc", {"a.b"}), lies_within("a.b", {"a.b"})
    (True, False, False)
    """
    names = path.split(".")
    return any(".".join(names[:end]) in others for end in range(1, len(names)))


# A folder that holds the quantized parts of a model: an index, and an artifact for each part.


_INDEX = "parts.json"
_FORMAT = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    path: str
    file: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,6}\.bq$")]
    multiply_adds: NonNegativeInt


class _Index(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: Annotated[int, Field(ge=_FORMAT, le=_FORMAT)] = _FORMAT
    parts: list[_Part]
    total: NonNegativeInt
    in_float: dict[str, str]
    uncounted: list[str] = []

    @model_validator(mode="after")
    def _each_place_once(self) -> _Index:
        paths = {part.path for part in self.parts}
        if len(paths) < len(self.parts):
            raise ValueError("a part stands in it twice")
        if any(lies_within(path, paths) for path in paths):
            raise ValueError("a part lies within another")
        if sum(part.multiply_adds for part in self.parts) > self.total:
            raise ValueError("its parts have more multiply-adds than the whole model")
        return self


def save_parts(
    quantized: PartlyQuantized, folder: str | os.PathLike[str], *, allow: Sequence[str] = ()
) -> None:
    """Write the parts of a model into a new folder: ``parts.json``, and a file for each part, which ``load``
    reads, too. The rest of the model, its code and what stays float, is not in it.

    Args:
        allow: as of ``save``.

    Raises:
        UsageError: the folder exists, or cannot be written.
        ArtifactError: as ``save``.

    >>> import torch
    >>> from backquant.api.parts import quantize_parts
    >>> from backquant.files import workspace
    >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    >>> made = quantize_parts(model, calibration=[torch.randn(8, 4)])
    >>> with workspace() as place:
    ...     save_parts(made, place / "parts")
    ...     list(load_parts(model, place / "parts").parts)
    ['0', '1']
    """
    target = Path(folder)
    if os.path.lexists(target):
        raise UsageError(
            f"{target} exists",
            where=f"save_parts(..., {str(target)!r})",
            fix=f"folder={str(target.with_name(target.name + '-2'))!r}   # one that is not there yet",
        )
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        staging.mkdir()
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written: {error.strerror}",
            where=f"save_parts(..., {str(target)!r})",
            fix="name a folder in one that can be written to",
        ) from error
    try:
        rows = []
        for place, (path, part) in enumerate(quantized.parts.items()):
            rows.append(
                _Part(path=path, file=f"{place}.bq", multiply_adds=quantized.multiply_adds[path])
            )
            save(part, staging / rows[-1].file, allow=allow)
        index = _Index(
            parts=rows,
            total=quantized.total,
            in_float=dict(quantized.in_float),
            uncounted=list(quantized.uncounted),
        )
        (staging / _INDEX).write_text(index.model_dump_json(indent=1), encoding="utf-8")
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load_parts(
    model: nn.Module, folder: str | os.PathLike[str], *, allow: Sequence[str] = ()
) -> PartlyQuantized:
    """``model``, which is not changed, with the parts that ``save_parts`` wrote.

    Args:
        model: the float model that was quantized, with its weights: what stays float is taken from it.
        allow: as of ``load``.

    Raises:
        ArtifactError: the folder holds no parts, or parts of another model; and as ``load``.
        UsageError: as ``quantize``, for ``model``.
    """
    place, kept = Path(folder), given_model(model)
    index = _index(place)
    known = {path for path, _ in kept.named_modules(remove_duplicate=False)}
    for row in index.parts:
        if not row.path or row.path not in known:
            raise ArtifactError(
                f"the model has no part {row.path!r}",
                where=str(place / _INDEX),
                fix="load_parts(model, ...)   # the model that was quantized, or one of the same structure",
            )
    parts = {row.path: load(place / row.file, allow=allow) for row in index.parts}
    rest = with_parts(evaluation_copy(kept), {path: nn.Identity() for path in parts})
    own_in_place(rest)
    counts = {row.path: row.multiply_adds for row in index.parts}
    model = with_parts(rest, parts)
    uncounted = tuple(index.uncounted)
    return PartlyQuantized(model, parts, counts, index.total, index.in_float, uncounted)


def _index(place: Path) -> _Index:
    try:
        return _Index.model_validate(read_json((place / _INDEX).read_bytes()))
    except OSError as error:
        raise ArtifactError(
            f"{place} holds no quantized parts: {error.strerror}",
            where=str(place / _INDEX),
            fix="backquant.save_parts(quantized, folder)   # writes them",
        ) from error
    except ValueError as error:  # pydantic's, too
        said, loc = str(error), ""
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            said, loc = (
                first["msg"].removeprefix("Value error, "),
                ", " + ".".join(map(str, first["loc"])),
            )
        raise ArtifactError(
            f"{place} holds no index of parts: {said}",
            where=f"{place / _INDEX}{loc.rstrip(', ')}",
            fix="write the parts again: backquant.save_parts(quantized, folder)",
        ) from error
