"""A checkpoint is written shard by shard, from a Hugging Face folder and the layers that are quantized.

1. Before anything is written all is laid out on ``meta``: names, sizes, and whether the disk has room.
2. Shards are those of the source, each written in one step into a hidden folder beside the place.
3. That folder gets the name of the place when all is there. A run that was broken off goes on after its last
   shard, if the source and the request are the same; else it begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from backquant.backend_config import BackendConfig, DTypeConfig
from backquant.deploy.checkpoints.formats import Format
from backquant.deploy.checkpoints.layer import (
    Activation,
    Layer,
    Scheme,
    empty_layer,
    is_exact,
    layer_of,
    quantized_layers,
)
from backquant.deploy.checkpoints.read import DTYPES, HubFolder, Source
from backquant.dtypes import find_dtype
from backquant.errors import ExportError, UsageError
from backquant.files import replace_file
from backquant.lower.qdq import is_dequantize
from backquant.match import Plan
from backquant.match.refusal import described_by_node
from backquant.reason_codes import ReasonCode

_INDEX = "model.safetensors.index.json"
_WEIGHT = ".weight"
_PROGRESS = "backquant.json"
_SHOWN = 3


@dataclass(frozen=True)
class Contents:
    """What goes into a checkpoint in place of what the source holds.

    ``schemes``: of the quantized layers, by path. ``make``: the layer of a path. ``left``: linear layers that
    stay float. ``changed``: other tensors by name, where they are not those of the source.
    ``scale_dtype``: one
    that has all scales. ``resumable``: a text that is the same for the same contents; empty: none is.
    """

    schemes: Mapping[str, Scheme]
    make: Callable[[str], Layer]
    left: tuple[str, ...] = ()
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    scale_dtype: torch.dtype = torch.float32
    resumable: str = ""


def write_checkpoint(
    source: Source,
    contents: Contents,
    form: Format,
    place: Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
) -> list[Path]:
    """Write ``contents`` to the folder ``place``; the files.

    Raises ``UsageError`` if something is there and not ``overwrite``; ``ExportError`` where a layer has no
    place in the source, the disk has no room, or the folder cannot be written.
    """
    check_folder(place, overwrite)
    told_by = {form.key: form.config(contents.schemes, contents.left)}
    layouts = {
        file: dict(_laid_out(source, contents, form, names))
        for file, names in source.shards.items()
    }
    work = place.with_name(f".{place.name}.backquant")
    done = _resumed(work, _fingerprint(source, contents, form))
    _check_room(place, [layout for file, layout in layouts.items() if file not in done])
    header = form.metadata(contents.schemes, source.sizes)
    told, total = 0, sum(map(len, source.shards.values()))
    try:
        for file, names in source.shards.items():
            if file not in done:
                pieces = _tensors(source, contents, form, names)
                if progress is not None:
                    pieces = _counted(pieces, told, total, progress)
                write_stream(work / file, layouts[file], pieces, header)
            told += len(names)
        _finish(work, source, layouts, told_by)
        return _published(work, place)
    except OSError as error:
        raise ExportError(
            f"{place} cannot be written: {error.strerror or error}",
            where=str(error.filename or place),
            fix="make room, or choose another folder; finished shards are kept, the same call goes on",
        ) from error


def check_folder(place: Path, overwrite: bool) -> None:
    """Raise ``UsageError`` when something is at ``place``, or no folder to make it in."""
    if not place.resolve().parent.is_dir():
        raise UsageError(
            f"there is no folder {place.parent}", where="path", fix=f"mkdir -p {place.parent}"
        )
    if os.path.lexists(place) and not (overwrite and place.is_dir()):
        raise UsageError(f"{place} exists", where="path", fix="overwrite=True   # or another name")


def _laid_out(
    source: Source, contents: Contents, form: Format, names: list[str]
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        path = name.removesuffix(_WEIGHT)
        size = source.sizes[name]
        if name.endswith(_WEIGHT) and path in contents.schemes:
            rows, columns = size.shape
            scheme = contents.schemes[path]
            layer = empty_layer(path, scheme, (rows, columns), contents.scale_dtype)
            for end, tensor in form.tensors(layer).items():
                yield f"{path}.{end}", tensor
        else:
            yield name, contents.changed.get(name, size).to("meta", size.dtype)


def _tensors(
    source: Source, contents: Contents, form: Format, names: list[str]
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        path = name.removesuffix(_WEIGHT)
        if name.endswith(_WEIGHT) and path in contents.schemes:
            layer = contents.make(path)
            layer = replace(layer, scale=layer.scale.to(contents.scale_dtype))
            for end, tensor in form.tensors(layer).items():
                yield f"{path}.{end}", tensor
        elif name in contents.changed:
            yield name, contents.changed[name].to(source.sizes[name].dtype)
        else:
            yield name, source.read(name)


def _counted(
    pieces: Iterator[tuple[str, Tensor]],
    before: int,
    total: int,
    progress: Callable[[int, int | None], None],
) -> Iterator[tuple[str, Tensor]]:
    """Tell how many tensors of the source are done, by those that are written."""
    seen: set[str] = set()
    for name, tensor in pieces:
        seen.add(name.rpartition(".")[0])
        progress(min(before + len(seen), total), total)
        yield name, tensor


def _fingerprint(source: Source, contents: Contents, form: Format) -> str:
    if not contents.resumable:
        return os.urandom(16).hex()
    files = [source.place / file for file in source.shards]
    state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    schemes = sorted((path, str(scheme)) for path, scheme in contents.schemes.items())
    whole = json.dumps([contents.resumable, form.name, source.config, state, schemes])
    return hashlib.sha256(whole.encode()).hexdigest()


def _resumed(work: Path, fingerprint: str) -> set[str]:
    """Rule 3: the shards that are there."""
    mark = work / _PROGRESS
    try:
        if mark.read_text(encoding="utf-8") == fingerprint:
            return {file.name for file in work.glob("*.safetensors")}
    except OSError:
        pass
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    mark.write_text(fingerprint, encoding="utf-8")
    return set()


def _check_room(place: Path, layouts: list[dict[str, Tensor]]) -> None:
    check_bytes(place, sum(size_of(tensor) for layout in layouts for tensor in layout.values()))


def check_bytes(place: Path, needed: int) -> None:
    """Raise ``ExportError`` where the disk has no room for as many bytes."""
    free = shutil.disk_usage(place.resolve().parent).free
    if needed > free:
        raise ExportError(
            f"{place} needs {needed / 1e9:.2f} GB, and the disk has {free / 1e9:.2f}",
            where=str(place),
            fix="make room, or choose a folder on another disk; nothing was written",
        )


def _finish(
    work: Path, source: Source, layouts: Mapping[str, Mapping[str, Tensor]], added: dict[str, Any]
) -> None:
    config = {**source.config, **added}
    _write_json(work / "config.json", config)
    if len(layouts) > 1:
        sizes = [size_of(tensor) for layout in layouts.values() for tensor in layout.values()]
        weight_map = {name: file for file, layout in layouts.items() for name in layout}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        _write_json(work / _INDEX, index)
    for file in source.others():
        shutil.copyfile(file, work / file.name)
    (work / _PROGRESS).unlink()


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _published(work: Path, place: Path) -> list[Path]:
    """Rule 3; a folder that is replaced is moved away first, and removed when the new one is there."""
    old = place.with_name(f".{place.name}.backquant-old")
    shutil.rmtree(old, ignore_errors=True)
    if place.is_dir():
        place.rename(old)
    work.rename(place)
    shutil.rmtree(old, ignore_errors=True)
    return sorted(place.iterdir())


def check_places(source: Source, contents: Contents, target: str) -> None:
    """Raise ``ExportError`` for quantized layers without a weight in the source, and for new tensors."""
    missing = [path for path in contents.schemes if f"{path}{_WEIGHT}" not in source.sizes]
    new = [name for name in contents.changed if name not in source.sizes]
    for names, what in ((missing, "quantized layers"), (new, "tensors that quantizing has added")):
        if names:
            listed = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            raise ExportError(
                f"{source.place} has no place for {what}: {listed}",
                where=f"to={target!r}",
                fix="the folder of the model that was quantized; biases that were added by a recipe: "
                'recipe="none"'
                if names is new
                else "the folder of the model that was quantized",
            )


# A safetensors file written one tensor at a time: its header is known before the first of them is made.
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


def size_of(tensor: Tensor) -> int:
    """Bytes of its values.

    >>> size_of(torch.zeros(3, dtype=torch.int16))
    6
    """
    return tensor.numel() * tensor.element_size()


def write_stream(
    path: Path,
    layout: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write ``tensors``, whose names, sizes and dtypes, in this order, are those of ``layout``;
    ``metadata``: what the header says beside them.

    Raises ``OSError``, and ``ExportError`` for a tensor that is not as ``layout`` says.

    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.torch import load_file
    >>> with TemporaryDirectory() as folder:
    ...     write_stream(Path(folder) / "a.safetensors", {"x": torch.zeros(2)}, [("x", torch.ones(2))])
    ...     load_file(f"{folder}/a.safetensors")
    {'x': tensor([1., 1.])}
    """
    replace_file(path, _pieces(layout, iter(tensors), metadata or {}))


def _pieces(
    layout: Mapping[str, Tensor],
    tensors: Iterator[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    begin = 0
    for name, tensor in layout.items():
        end = begin + size_of(tensor)
        shape = list(tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for name, planned in layout.items():
        found, tensor = next(tensors)
        if (found, tensor.dtype, tensor.shape) != (name, planned.dtype, planned.shape):
            raise ExportError(
                f"{found} is {tensor.dtype}{list(tensor.shape)}, and was to be {name}, "
                f"{planned.dtype}{list(planned.shape)}",
                where="a checkpoint's layout",
                fix="what shares a scale, or whether there are zero points, has changed on the way",
            )
        yield tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


# What goes into a checkpoint, from a quantized model: its integers, and what quantizing has changed
# beside them.


def contents_of(
    module: fx.GraphModule, plan: Plan, config: BackendConfig, source: HubFolder, target: str
) -> Contents:
    """The quantized layers of a reference graph, whose float model is in ``source``.

    Raises ``ExportError`` for layers and tensors without a place in the source, and for operators that a
    recipe has added.
    """
    _refuse_added(plan, target)
    described = described_by_node(plan, config)
    called = {str(node.target): node for node in module.graph.nodes if node.op == "call_module"}
    modules = dict(quantized_layers(module))
    layers: dict[str, Layer] = {}
    for path, part in modules.items():
        activation = _activation(called[path], described) if path in called else None
        entry = described.get(called[path].name) if path in called else None
        stored = None if entry is None else entry.weight_dtype_with_constraints.scale_dtype
        layers[path] = layer_of(path, part, activation, stored)
    changed = dict(_changed(module, modules, source))
    left = tuple(path for path, m in module.named_modules() if type(m) is nn.Linear)
    schemes = {path: layer.scheme for path, layer in layers.items()}
    exact = all(is_exact(layer.scale, source.dtype) for layer in layers.values())
    dtype = source.dtype if exact else torch.float32
    contents = Contents(schemes, layers.__getitem__, left, changed, dtype)
    check_places(source, contents, target)
    return contents


def _refuse_added(plan: Plan, target: str) -> None:
    for name, decision in plan.decisions.items():
        added = any(reason.rule == ReasonCode.RECIPE for reason in decision.reasons)
        if added:
            raise ExportError(
                f"a recipe has added the product {name}, which the architecture does not have",
                where=f"{decision.module_path or name}, to={target!r}",
                fix='a recipe without the step products: recipe=["weight-clipping", "gptq"]',
            )


def _activation(node: fx.Node, described: Mapping[str, DTypeConfig]) -> Activation | None:
    config = described.get(node.name)
    row = None if config is None else find_dtype(config.input_dtype)
    if config is None or row is None or not row.is_stored:
        return None
    dtype = row.name.removeprefix("q")
    if config.is_dynamic:
        shared = config.input_dtype_with_constraints.granularity
        return Activation(dtype, per_token=shared == "per_token", symmetric=row.is_float)
    given = node.args[0]
    scale = _scale(given) if isinstance(given, fx.Node) else None
    if scale is None:
        raise ExportError(
            f"the input of {node.target} has a zero point, or no scale that is known",
            where=str(node.target),
            fix="activations with a symmetric scheme: torch.per_tensor_symmetric",
        )
    return Activation(dtype, scale=torch.tensor(scale))


def _scale(dequantize: fx.Node) -> float | None:
    """The one scale of a value without a zero point; None: it has other qparams."""
    if str(dequantize.target) == "backquant.dequantize_float8.default":
        return float(dequantize.args[1])  # type: ignore[arg-type]
    if is_dequantize(dequantize) and dequantize.args[2] == 0:
        return float(dequantize.args[1])  # type: ignore[arg-type]
    return None


def _changed(
    module: fx.GraphModule, layers: Mapping[str, nn.Module], source: HubFolder
) -> Iterator[tuple[str, Tensor]]:
    """Float tensors that are not those of the source, and biases that it does not have."""
    for name, tensor in module.named_parameters(remove_duplicate=False):
        path, _, end = name.rpartition(".")
        if name in source.sizes:
            before = source.read(name)
            if before.shape == tensor.shape and not torch.equal(before.to(tensor.dtype), tensor):
                yield name, tensor.detach()
        elif end == "bias" and path in layers and bool(tensor.any()):
            yield name, tensor.detach()
