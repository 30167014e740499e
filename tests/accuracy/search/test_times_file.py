from __future__ import annotations

from pathlib import Path

from backquant.accuracy.search.runners import TimesFile


def test_what_was_measured_is_known_the_next_time(tmp_path: Path) -> None:
    TimesFile(tmp_path / "new", "x86").keep({"kernel": 1.5})
    again = TimesFile(tmp_path / "new", "x86")
    assert again.known == {"kernel": 1.5}
    again.keep({"kernel": 9.0, "other": 2.0})
    assert TimesFile(tmp_path / "new", "x86").known == {"kernel": 1.5, "other": 2.0}
    assert TimesFile(tmp_path / "new", "qnnpack").known == {}


def test_a_file_that_cannot_be_read_or_written_is_none(tmp_path: Path) -> None:
    times = TimesFile(tmp_path, "x86")
    assert times.path is not None
    times.path.write_text("[1]")
    assert TimesFile(tmp_path, "x86").known == {}
    (tmp_path / "file").write_text("")
    blocked = TimesFile(tmp_path / "file", "x86")
    blocked.keep({"kernel": 1.0})
    assert blocked.known == {"kernel": 1.0} and blocked.path is None
