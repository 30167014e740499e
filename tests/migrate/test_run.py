"""Whole folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from backquant.errors import UsageError
from backquant.migrate import migrate_paths

OLD = "from torch.ao.quantization import QConfig\n"
NEW = "from backquant.ao.quantization import QConfig\n"


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_writing(tmp_path: Path) -> None:
    a, b = put(tmp_path / "a.py", OLD), put(tmp_path / "b.py", "x = 1\n")
    seen: list[tuple[int, int]] = []
    migration = migrate_paths([tmp_path], write=True, progress=lambda *n: seen.append(n))
    assert (a.read_text(encoding="utf-8"), b.read_text(encoding="utf-8")) == (NEW, "x = 1\n")
    assert [r.path for r in migration.changed] == [str(a)]
    assert migration.changed[0].written
    assert seen == [(1, 2), (2, 2)]
    assert migrate_paths([tmp_path], write=True).is_clean


def test_without_write_nothing_is_touched(tmp_path: Path) -> None:
    path = put(tmp_path / "a.py", OLD)
    before = path.stat()
    migration = migrate_paths([tmp_path])
    assert path.read_text(encoding="utf-8") == OLD
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert not migration.is_clean
    assert not migration.changed[0].written


def test_the_diff(tmp_path: Path) -> None:
    path = put(tmp_path / "a.py", OLD.rstrip("\n"))
    assert migrate_paths([tmp_path]).diff() == (
        f"--- a{path}\n+++ b{path}\n@@ -1 +1 @@\n"
        f"-{OLD}\\ No newline at end of file\n+{NEW}\\ No newline at end of file\n"
    )


def test_one_bad_file_does_not_stop_the_others(tmp_path: Path) -> None:
    put(tmp_path / "a.py", OLD + "def f(:\n")
    (tmp_path / "b.py").write_bytes(b"# coding: utf-8\n\xff torch quantization\n")
    (tmp_path / "c.py").write_bytes(b"# coding: klingon\n")
    good = put(tmp_path / "d.py", OLD)
    migration = migrate_paths([tmp_path], write=True)
    assert [(Path(f.path).name, f.kind) for f in migration.findings] == [
        ("a.py", "syntax error"),
        ("b.py", "file"),
        ("c.py", "file"),
    ]
    assert good.read_text(encoding="utf-8") == NEW


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "a.py", OLD)

    def fail(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("backquant.migrate.run.write_text", fail)
    migration = migrate_paths([tmp_path], write=True)
    assert [(f.kind, f.why) for f in migration.findings] == [("file", "read-only")]
    assert not migration.changed[0].written
    assert path.read_text(encoding="utf-8") == OLD


def test_a_character_that_the_files_encoding_has_not(tmp_path: Path) -> None:
    """Nothing that is inserted needs more than ASCII: a Latin-1 file is written as such."""
    path = tmp_path / "a.py"
    path.write_bytes(b"# coding: latin-1\n# \xe9\n" + OLD.encode())
    assert migrate_paths([tmp_path], write=True).findings == ()
    assert path.read_bytes() == b"# coding: latin-1\n# \xe9\n" + NEW.encode()


def test_data(tmp_path: Path) -> None:
    put(tmp_path / "a.py", OLD)
    put(tmp_path / "b.py", "x = 1\n")
    put(tmp_path / "c.py", "import torch.ao.quantization as q\nq.quantize_jit(m)\n")
    data = migrate_paths([tmp_path]).to_dict()
    assert data["counts"] == {
        "files": 3,
        "changed": 1,
        "written": 0,
        "held": 1,
        "needs_person": 1,
    }
    assert [Path(f["path"]).name for f in data["files"]] == ["a.py", "c.py"]
    assert data["needs_person"][0]["line"] == 2


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        migrate_paths([tmp_path / "no"])
