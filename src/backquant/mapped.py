"""Weights that stay in files: mapped, read when they are needed, and released."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from backquant.errors import ArtifactError, UsageError, did_you_mean, first_line
from backquant.graph import shallow_copy
from backquant.graph.interception import DispatchMode
from backquant.identifiers import wrapper_prefix
from backquant.json_text import read_json
from backquant.runtime.heap import give_back

# Tensors whose bytes lie in files: the system reads what is used, and what was used is given back.
#
# Pages of a mapped file that nobody wrote to can be dropped at any moment, and are read again when they are
# needed. The system drops them when memory gets short; here they are dropped before that, so that the
# memory of the process stays below a bound that can be measured, whatever else runs on the machine.


_RESIDENT = 128 << 20  # bytes of mapped tensors that may stay in memory
_LEAST = 1 << 16  # bytes of a tensor that is worth a file
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_DONT_NEED = 4  # MADV_DONTNEED of Linux
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class MappedMemory(DispatchMode):
    """While it is active, at most ``resident`` bytes of mapped tensors, and those of the operator that runs,
    stay in memory. Mapped tensors must not be written to.

    Args:
        folder: where files for ``kept`` are made; each is without a name, and gone with its tensor.
        resident: bytes.

    >>> with MappedMemory(Path(tempfile.gettempdir())) as memory:
    ...     kept = memory.kept(torch.ones(1 << 15))
    ...     float(kept.sum())
    32768.0
    """

    def __init__(self, folder: Path, resident: int = _RESIDENT) -> None:
        super().__init__()
        self._folder, self._resident = folder, resident
        # By where its memory begins; held, so that nothing else comes to lie there.
        self._mapped: dict[int, torch.UntypedStorage] = {}
        self._touched: dict[int, int] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """``tensor`` is mapped."""
        storage = tensor.untyped_storage()
        self._mapped[storage.data_ptr()] = storage

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values, mapped from a file if they are many and lie in order.

        Raises ``ArtifactError`` where it cannot be written.
        """
        size = tensor.numel() * tensor.element_size()
        if size < _LEAST or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return tensor
        if tensor.untyped_storage().data_ptr() in self._mapped:
            return tensor
        plain = tensor.detach().reshape(-1).view(torch.uint8)
        try:
            with tempfile.NamedTemporaryFile(prefix=".backquant-", dir=self._folder) as file:
                file.write(plain.numpy().data)
                file.flush()
                storage = torch.UntypedStorage.from_file(file.name, shared=False, nbytes=size)
        except OSError as error:
            raise ArtifactError(
                f"integer weights cannot be kept in {self._folder}: {error.strerror or error}",
                where=str(self._folder),
                fix="make room, or choose another folder; they need as much again as the artifact",
            ) from error
        flat = torch.empty(0, dtype=torch.uint8).set_(cast(torch.UntypedStorage, storage))
        made: torch.Tensor = flat.view(tensor.dtype)
        made = made.view(tensor.shape)
        self.note(made)
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        used = {begin: self._mapped[begin].nbytes() for begin in self._among((args, kwargs))}
        if used:
            schema = getattr(func, "_schema", None)
            if schema is not None and schema.is_mutable:
                self._forget(used)  # may be written to: these pages are in no file
            else:
                self._make_room(used)
        return func(*args, **kwargs)

    def _among(self, values: Any) -> Iterator[int]:
        for value in tree_leaves(values):
            if type(value) in _PLAIN and value.layout == torch.strided and value.is_cpu:
                begin = value.untyped_storage().data_ptr()
                if begin in self._mapped:
                    yield begin

    def _forget(self, used: Iterable[int]) -> None:
        for begin in used:
            self._mapped.pop(begin, None)
            self._touched.pop(begin, None)

    def _make_room(self, used: dict[int, int]) -> None:
        if sum((self._touched | used).values()) > self._resident:
            for begin, size in self._touched.items():
                _drop(begin, size)
            give_back()  # the gaps between small tensors add up, layer by layer
            self._touched = {}
        self._touched |= used


_SYSTEM = ctypes.CDLL(None) if os.name == "posix" else None
_ADVISE = getattr(_SYSTEM, "madvise", None)


def _drop(begin: int, size: int) -> None:
    """Give the pages of a private mapping back, where the system can."""
    first, end = -(-begin // _PAGE) * _PAGE, (begin + size) // _PAGE * _PAGE
    if _ADVISE is not None and end > first:
        _ADVISE(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _DONT_NEED)


# The tensors of safetensors files by name, mapped; not read before they are used.


_INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class WeightFiles:
    """Where each tensor lies, by its name.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"a": torch.ones(2)}, f"{folder}/model.safetensors")
    ...     dict(WeightFiles.of(folder).files)["a"].name
    'model.safetensors'
    """

    place: Path
    files: Mapping[str, Path]

    @classmethod
    def of(cls, place: str | os.PathLike[str]) -> WeightFiles:
        """Those of a ``.safetensors`` file, of an index of several, or of a folder of either.

        Raises ``UsageError`` where there are none, and ``ArtifactError`` for a file that is damaged, a name
        that stands in two files, and an index that does not say what is there.
        """
        path = Path(place)
        indices = sorted(path.glob(f"*{_INDEX}")) if path.is_dir() else []
        if path.name.endswith(_INDEX):
            return _indexed(path)
        if len(indices) == 1:
            return _indexed(indices[0])
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise UsageError(
                f"there are no weights at {path}",
                where=f"files={str(path)!r}",
                fix="name a .safetensors file, its .safetensors.index.json, or their folder:\n"
                "model.save_pretrained(folder), or safetensors.torch.save_model(model, path)",
            )
        return cls(path, _in_files(files))

    def tensors(self, memory: MappedMemory) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, mapped, and known to ``memory``."""
        by_file: dict[Path, list[str]] = {}
        for name, file in self.files.items():
            by_file.setdefault(file, []).append(name)
        for file, names in by_file.items():
            with _opened(file) as stream:
                for name in names:
                    tensor = stream.get_tensor(name)
                    memory.note(tensor)
                    yield name, tensor


def _in_files(files: list[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in files:
        with _opened(file) as stream:
            for name in stream.keys():  # noqa: SIM118 - it has no __iter__
                if name in found:
                    raise ArtifactError(
                        f"tensor {name!r} stands in two files",
                        where=f"{found[name]}, {file}",
                        fix="name the file that counts, or an index of those that belong together",
                    )
                found[name] = file
    return found


def _indexed(path: Path) -> WeightFiles:
    try:
        table = read_json(path.read_bytes())["weight_map"]
        files = {str(name): path.parent / Path(str(file)).name for name, file in table.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path} is no index of safetensors files: {first_line(error)}",
            where=str(path),
            fix='{"weight_map": {"name of a tensor": "name of a file beside the index"}}',
        ) from error
    there = _in_files([file for file in dict.fromkeys(files.values()) if file.is_file()])
    for name, file in files.items():
        if there.get(name) != file:
            raise ArtifactError(
                f"{file.name} does not hold the tensor {name!r}, which the index names",
                where=str(path),
                fix="copy all files of the model again, with their index",
            )
    return WeightFiles(path, files)


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{file} is no readable safetensors file: {first_line(error)}",
            where=str(file),
            fix="copy or download it again; it may be truncated",
        ) from error


# Models that are made without memory for their weights.


_EMPTY = frozenset({torch.empty, torch.empty_strided, torch.Tensor.new_empty})


class EmptyOnMeta(TorchFunctionMode):
    """While it is active, tensors that are made without values are on the device ``meta``.

    Those are the parameters of torch's modules before they are initialized. What is made with values, as
    tables of positions in buffers that no file holds, is as it would be. Of this thread only.

    >>> with EmptyOnMeta():
    ...     made = torch.nn.BatchNorm1d(3)
    >>> made.weight.device.type, made.running_mean.device.type
    ('meta', 'cpu')
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _EMPTY:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


# A model with the weights of files in place of those that it has, or lacks.
#
# 1. Every parameter and every buffer of ``state_dict`` is in the files, with its shape and dtype; those
#    that are one tensor in the model (tied weights) under one of their names, or under several with equal
#    values.
# 2. Every tensor in the files has a place in the model, with or without a wrapper's prefix (``module.``).
# 3. What stands in no ``state_dict`` (tables of positions) comes with the model, so it may not be on
#    ``meta``.


_SHOWN = 3
_FACTORY = "pass what makes the model, which is then called without memory for its weights:\n"


def filled(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    place: Path,
    ignored: Collection[str] = (),
) -> nn.Module:
    """A copy of ``model`` that holds ``tensors``; ``ignored``: patterns of names in files that have no place.

    Raises ``UsageError`` that names what does not fit.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(2, 1)
    >>> filled(model, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, Path("w"))(torch.ones(2))
    tensor([2.], grad_fn=<ViewBackward0>)
    """
    copied = shallow_copy(model)
    slots = dict(_slots(copied))
    prefix = wrapper_prefix(tensors, slots)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    extra = [
        name for name in tensors if name not in slots and not any(fnmatch(name, i) for i in ignored)
    ]
    if extra:
        raise UsageError(
            f"the files hold {_listed(extra)}, which the model has no place for",
            where=str(place),
            fix=did_you_mean(extra[0], slots, f"ignore=[{extra[0]!r}]"),
        )
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, (_, _, wanted) in slots.items():
        if name in tensors:
            _check_fits(name, wanted, tensors[name], place)
            first, known = found.setdefault(id(wanted), (name, tensors[name]))
            if first != name and not torch.equal(known, tensors[name]):
                raise UsageError(
                    f"{first!r} and {name!r} are one tensor in the model, and two in the files",
                    where=str(place),
                    fix="make the model without tied weights: tie_word_embeddings=False",
                )
    missing = [name for name, (_, _, wanted) in slots.items() if id(wanted) not in found]
    if missing:
        raise UsageError(
            f"the files lack {_listed(missing)}",
            where=str(place),
            fix=did_you_mean(
                missing[0], tensors, "write all of them: model.save_pretrained(folder)"
            ),
        )
    made: dict[int, torch.Tensor] = {}
    for owner, key, wanted in slots.values():
        value = made.setdefault(id(wanted), _like(wanted, found[id(wanted)][1]))
        table = owner._parameters if key in owner._parameters else owner._buffers
        table[key] = value  # type: ignore[assignment]
    _check_no_meta(copied)
    return copied


def _slots(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, torch.Tensor]]]:
    """Rule 1: by name the module, the name in it, and the tensor."""
    for prefix, owner in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for key, tensor in owner._parameters.items():
            if tensor is not None:
                yield f"{start}{key}", (owner, key, tensor)
        for key, buffer in owner._buffers.items():
            if buffer is not None and key not in owner._non_persistent_buffers_set:
                yield f"{start}{key}", (owner, key, buffer)


def _check_fits(name: str, wanted: torch.Tensor, found: torch.Tensor, place: Path) -> None:
    if wanted.shape != found.shape:
        raise UsageError(
            f"{name!r} is {list(found.shape)} in the files, and {list(wanted.shape)} in the model",
            where=str(place),
            fix="make the model with the configuration that the files were written with",
        )
    if wanted.dtype != found.dtype:
        dtype = str(found.dtype)
        raise UsageError(
            f"{name!r} is {dtype} in the files, and {wanted.dtype} in the model",
            where=str(place),
            fix=f"model.to({dtype}), or in the function that makes it",
        )


def _like(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    if not isinstance(wanted, nn.Parameter):
        return found
    return nn.Parameter(found, requires_grad=wanted.requires_grad)


def _check_no_meta(model: nn.Module) -> None:
    """Rule 3."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UsageError(
                f"the buffer {name!r} has no values: it is on meta, and no file holds it",
                where="model",
                fix=f"{_FACTORY}quantize_files(lambda: {type(model).__name__}(...), files, to)",
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
