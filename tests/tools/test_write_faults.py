"""One writer under the faults that need no mount; ``tools/write_faults.py`` by itself tries all of both."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from tools.write_faults import FAULTS, HAS_FILTER, MOUNTS, attempts

from backquant.errors import UsageError
from backquant.files import write_text
from tools import write_faults

NO_MOUNT = [f for f in FAULTS if f not in MOUNTS and (HAS_FILTER or f != "quota")]


def outcomes(monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], object], root: Path) -> str:
    monkeypatch.setattr(write_faults, "writer", lambda _: write)
    return " ".join(outcome for _, outcome in attempts("report", NO_MOUNT, root / "attempt"))


def test_a_writer_under_faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "a page" * 999

    def sound(path: Path) -> None:
        write_text(path, text, "save_html(path)")

    found = outcomes(monkeypatch, sound, tmp_path)
    assert set(found.split()) == {"new", "said"} and found.count("said") > 4


@pytest.mark.parametrize("kind", ["half", "litter", "raw", "silent", "reason"])
def test_what_is_not_sound_is_told(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(path: Path) -> None:
        if kind == "half":
            path.write_text("a page" * 999)
        if kind == "litter":
            (path.parent / "page.tmp").write_text("")
        try:
            write_text(path, "a page" * 999, "")
        except UsageError as error:
            if kind == "raw":
                raise OSError(errno.EIO, "File too large", str(path)) from error
            if kind == "reason":
                raise UsageError(f"{path} cannot be written") from None
            if kind != "silent":
                raise

    defects = {
        "half": "neither the old files nor the new ones",
        "litter": "litter: ['page.tmp']",
        "raw": "status 70, and it does not say where",
        "silent": "no error, and not the new files",
        "reason": "it does not say why",
    }
    monkeypatch.setattr(write_faults, "FAULTS", {"limit": FAULTS["limit"]})
    monkeypatch.setattr(write_faults, "writer", lambda _: write)
    found = [outcome for _, outcome in attempts("report", ["limit"], tmp_path / "attempt")]
    assert any(outcome.startswith(defects[kind]) for outcome in found), found
