"""A file is replaced in one step, or stays as it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from backquant.errors import UsageError
from backquant.files import replace_file, write_text


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_what_was_there(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os if step == "fsync" else Path, step, fail)
    with pytest.raises(OSError, match="disk full") as caught:
        replace_file(path, b"after")
    assert caught.value.filename == str(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_mode_is_that_of_the_file_or_of_any_new_one(tmp_path: Path) -> None:
    old, new, other = tmp_path / "old", tmp_path / "new", tmp_path / "other"
    old.touch()
    old.chmod(0o640)
    for path in (old, new):
        replace_file(path, b"after")
    other.touch()
    assert old.stat().st_mode & 0o777 == 0o640
    assert new.stat().st_mode == other.stat().st_mode


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    replace_file(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"after"


@pytest.mark.parametrize(
    "place", ["file/page.html", "folder", "a\0b.html", "x" * 300, "/proc/page.html"]
)
def test_a_page_that_cannot_be_written_is_an_error_of_ours(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot be written: ") as caught:
        write_text(tmp_path / place, "<svg>", "save_html(path)")
    assert caught.value.where == "save_html(path)" and caught.value.fix
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"
