"""What a search has measured so far, in a file, to go on from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backquant.accuracy.search.losses import Noise
from backquant.accuracy.search.trials import Trial
from backquant.accuracy.twin import Twin
from backquant.errors import UsageError
from backquant.files import write_text
from backquant.json_text import read_json

_FORM = 2  # of ``losses``


class SearchState:
    """``losses``: by way of quantizing, for each batch the noise of all units and of all values. ``trials``:
    what was measured.

    ``path`` ``None``: nothing is kept. ``of``: what it has to be of, beside the model and its calibration:
    what runs it, the metric.
    """

    def __init__(self, path: str | os.PathLike[str] | None, twin: Twin, of: Sequence[str]) -> None:
        qparams = sorted((name, str(found)) for name, found in twin.record.qparams.items())
        known = json.dumps([[group.nodes for group in twin.groups], qparams, list(of), _FORM])
        self.of = hashlib.sha256(known.encode()).hexdigest()
        self.path = None if path is None else Path(path)
        self.losses: dict[str, list[Noise]] = {}
        self.trials: list[Trial] = []
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def keep_losses(self, way: str, batch: Noise) -> None:
        """Add the noise of one more batch."""
        self.losses.setdefault(way, []).append(batch)
        self.write()

    def keep_trials(self, trials: Sequence[Trial]) -> None:
        """All so far."""
        self.trials = list(trials)
        self.write()

    def write(self) -> None:
        """Replace the file."""
        if self.path is not None:
            data = {
                "of": self.of,
                "losses": self.losses,
                "trials": [trial.to_dict() for trial in self.trials],
            }
            write_text(self.path, json.dumps(data), f"resume={str(self.path)!r}")

    def _read(self, path: Path) -> None:
        try:
            data: Any = read_json(path.read_text(encoding="utf-8"))
            known, losses = data["of"], data["losses"]
            trials = [Trial.from_dict(each) for each in data["trials"]]
        except (ValueError, KeyError, TypeError) as error:
            raise _refused(path, "is no state of a search") from error
        if known != self.of:
            raise _refused(path, "is of another model, backend, calibration or metric")
        self.losses, self.trials = losses, trials


def _refused(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path} {what}",
        where=f"resume={str(path)!r}",
        fix="name a file that does not exist yet, or remove it to begin again",
    )
