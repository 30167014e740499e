"""What was measured is kept every so many batches, and a later run goes on from there.

Each rank has a file of its own: a digest, then a safetensors file of the observers' state, whose metadata say
of which prepared model, after how many batches, and of which data it is. The state is one of the multiset of
values, so a run that was resumed ends with the bytes of one that was not.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from backquant.calibrate.feed import waiting_for_data
from backquant.calibrate.group import Ranks
from backquant.calibrate.observers import site_observers, unchanged_on_error
from backquant.errors import BackquantError, CalibrationError, ConfigError, UsageError
from backquant.files import replace_file
from backquant.identifiers import label
from backquant.json_text import read_json

# What the observers measured, as plain tensors: to save, to resume, to merge across processes.


def calibration_state(prepared: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The state of all observers: ``"activation_post_process_0.min_val"`` → tensor. Copies.

    An observer that several sites share appears once. Raises UsageError when not prepared.

    >>> from torch import nn
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> calibration_state(prepared)["activation_post_process_0.min_val"]
    tensor(inf)
    """
    return state_of(site_observers(prepared))


def state_of(observers: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """``calibration_state`` of these observers."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, observer in observers.items()
        for key, value in observer.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def load_calibration_state(prepared: fx.GraphModule, state: Mapping[str, torch.Tensor]) -> None:
    """Give the observers of ``prepared`` what ``calibration_state`` returned; calibration resumes.

    Raises CalibrationError when the state is not that of a model prepared in the same way; then
    nothing changes.

    >>> from torch import nn
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> state = calibration_state(prepared)
    >>> _ = prepared(torch.ones(1, 2)); load_calibration_state(prepared, state)
    >>> prepared.activation_post_process_0.min_val
    tensor(inf)
    """
    load_observers(site_observers(prepared), state)


def load_observers(observers: Mapping[str, nn.Module], state: Mapping[str, torch.Tensor]) -> None:
    """``load_calibration_state`` of these observers."""
    parts = _parts(observers, state)
    with unchanged_on_error(observers.values()):
        for name, observer in observers.items():
            _load(name, observer, parts[name])


def merge_state(
    prepared: fx.GraphModule, *others: fx.GraphModule | Mapping[str, torch.Tensor]
) -> None:
    """Add what other copies of the prepared model measured (models, or their states).

    With order-free observers (min/max, per channel, histogram) the result is that of one process
    that saw all batches, bit for bit, in whatever order it is merged.

    Raises ConfigError naming the observer when one depends on order (moving averages), and
    CalibrationError when the copies differ; then nothing changes.

    >>> from torch import nn
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> other = copy.deepcopy(prepared)
    >>> _ = prepared(torch.ones(1, 2)), other(-torch.ones(1, 2))
    >>> merge_state(prepared, other)
    >>> prepared.activation_post_process_0.min_val, prepared.activation_post_process_0.max_val
    (tensor(-1.), tensor(1.))
    """
    merge_observers(site_observers(prepared), others)


def check_mergeable(prepared: fx.GraphModule) -> None:
    """Raise ConfigError that names the first observer that needs data and cannot be merged."""
    observers = site_observers(prepared)
    for waiting in waiting_for_data(prepared):
        observer = observers[waiting.site]
        _merge(f"{waiting.site} ({waiting.value})", copy.deepcopy(observer), observer.state_dict())


def merge_observers(
    observers: Mapping[str, nn.Module],
    others: Iterable[fx.GraphModule | Mapping[str, torch.Tensor]],
) -> None:
    """``merge_state`` of these observers alone."""
    with unchanged_on_error(observers.values()):
        for other in others:
            state = other if isinstance(other, Mapping) else calibration_state(other)
            parts = _parts(observers, state)
            for name, observer in observers.items():
                _merge(name, observer, parts[name])


def _merge(name: str, observer: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    merge = getattr(observer, "merge", None)
    if not callable(merge):
        raise ConfigError(
            f"{type(observer).__name__} cannot be merged: it has no merge(other)",
            where=name,
            fix="calibrate in one process, or define merge(self, other) in its class",
        )
    twin = copy.deepcopy(observer)
    _load(name, twin, state)
    try:
        merge(twin)
    except BackquantError as error:
        where = f"{name}: {error.where}" if error.where else name
        raise type(error)(error.what, where=where, fix=error.fix) from error


def _parts(
    observers: Mapping[str, nn.Module], state: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in observers}
    for key, value in state.items():
        name = key.rpartition(".")[0]
        while name and name not in parts:
            name = name.rpartition(".")[0]
        if not name:
            raise _foreign(f"it has {key!r}, which is of no observer of this model", key)
        parts[name][key[len(name) + 1 :]] = value
    return parts


def _load(name: str, observer: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    try:
        observer.load_state_dict(dict(state))
    except RuntimeError as error:
        raise _foreign(str(error).splitlines()[-1].strip(), name) from error


def _foreign(why: str, where: str) -> CalibrationError:
    return CalibrationError(
        f"the calibration state does not fit the prepared model: {why}",
        where=where,
        fix="prepare the model with the same backend and QConfigMapping as the one that was saved",
    )


_DIGEST = 64  # characters of a sha-256
_KEY = "backquant-checkpoint"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """Where calibration saves its progress, so that it can go on after a crash.

    Args:
        folder: where each rank writes its file; made if it does not exist. The files are removed at the end.
        every: batches between two writes.
        resume: go on from the files in the folder; otherwise they are overwritten. A damaged file is
            discarded, with a message on the logger ``backquant.calibrate.checkpoint``.

    >>> Checkpoint("kept", every=10)
    Checkpoint(folder='kept', every=10, resume=False)
    """

    folder: str | os.PathLike[str]
    every: int = 100
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(
                f"a checkpoint every {self.every} batches cannot be",
                where="Checkpoint(every=)",
                fix="every=100",
            )


class Kept:
    """The checkpoints of one rank while it calibrates."""

    def __init__(self, settings: Checkpoint, prepared: fx.GraphModule, ranks: Ranks) -> None:
        self._settings, self._prepared = settings, prepared
        self._folder = Path(settings.folder)
        self._path = self._folder / f"rank-{ranks.rank}-of-{ranks.size}.checkpoint"
        self._data = hashlib.sha256()
        self._fingerprint = fingerprint(prepared)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritten(error) from error
        others = {p.stem.rpartition("-")[2] for p in self._folder.glob("rank-*-of-*.checkpoint")}
        if settings.resume and others - {str(ranks.size)}:
            raise UsageError(
                f"the checkpoints there are of {', '.join(sorted(others))} ranks, not of {ranks.size}",
                where=str(self._folder),
                fix=f"checkpoint=Checkpoint({str(self._folder)!r})   # begins again; or start as many ranks",
            )

    def rest(self, batches: Iterable[Any]) -> tuple[int, Iterator[Any]]:
        """How many batches were measured before, and those that were not.

        Raises UsageError for the checkpoint of another model or request, CalibrationError for other data.
        """
        done, state, digest = self._read() if self._settings.resume else (0, {}, "")
        counted = self._counted(batches)
        for _ in islice(counted, done):
            pass
        if done:
            if self._data.hexdigest() != digest:
                raise CalibrationError(
                    f"the first {done} batches are not those that the checkpoint was made with",
                    where=str(self._path),
                    fix=f"checkpoint=Checkpoint({str(self._folder)!r})   # anew; or the data as before",
                )
            load_calibration_state(self._prepared, state)
        return done, counted

    def write(self, done: int) -> None:
        """After ``done`` batches, where it is time."""
        if done % self._settings.every:
            return
        about = {
            "fingerprint": self._fingerprint,
            "batches": done,
            "data": self._data.hexdigest(),
        }
        payload = save(calibration_state(self._prepared), metadata={_KEY: json.dumps(about)})
        digest = hashlib.sha256(payload).hexdigest().encode()
        try:
            replace_file(self._path, digest + payload)
        except OSError as error:
            raise self._unwritten(error) from error

    def remove(self) -> None:
        """All is done: nobody needs it."""
        self._path.unlink(missing_ok=True)

    def _counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            _add(self._data, batch)
            yield batch

    def _read(self) -> tuple[int, dict[str, torch.Tensor], str]:
        nothing = 0, dict[str, torch.Tensor](), ""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return nothing
        except OSError as error:
            raise self._unwritten(error) from error
        digest, payload = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(payload).hexdigest().encode() != digest:
            _log.warning("%s is damaged: it is discarded, and its rank begins again", self._path)
            return nothing
        try:
            state = load(payload)
            length = int.from_bytes(payload[:8], "little")
            about = read_json(read_json(payload[8 : 8 + length])["__metadata__"][_KEY])
            found = about["fingerprint"], int(about["batches"]), str(about["data"])
        except (SafetensorError, ValueError, LookupError, TypeError) as error:
            raise self._other() from error
        if found[0] != self._fingerprint:
            raise self._other()
        return found[1], state, found[2]

    def _other(self) -> UsageError:
        return UsageError(
            "the checkpoint is of another model, or of another request",
            where=str(self._path),
            fix=f"checkpoint=Checkpoint({str(self._folder)!r})   # begins again, over it",
        )

    def _unwritten(self, error: OSError) -> UsageError:
        return UsageError(
            f"checkpoints cannot be kept there: {error.strerror or error}",
            where=str(self._folder),
            fix="choose a folder that can be written to",
        )


def fingerprint(prepared: fx.GraphModule) -> str:
    """A digest of the graph, its numbers, and how its observers measure."""
    observers = site_observers(prepared)
    digest = hashlib.sha256(str(prepared.graph).encode())
    for name, observer in observers.items():
        settings: Any = getattr(observer, "_merge_settings", dict)()
        digest.update(f"{name} {type(observer).__qualname__} {settings}".encode())
    for name, value in prepared.state_dict().items():
        if not any(name.startswith(f"{label(observer)}.") for observer in observers):
            digest.update(name.encode(errors="surrogatepass"))
            _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, batch: Any) -> None:
    """The values of a batch, whatever holds them."""
    leaves, spec = tree_flatten(batch)
    digest.update(str(spec).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            flat = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(flat.numpy().data)
        else:
            digest.update(repr(leaf).encode())
