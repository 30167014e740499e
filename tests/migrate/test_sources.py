"""Which files are found, and how they are written."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from backquant.errors import UsageError
from backquant.migrate.run import find_files, read_text, write_text


def tree(base: Path, *names: str) -> None:
    for name in names:
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n", encoding="utf-8")


def found(base: Path, *exclude: str) -> list[str]:
    return [path.relative_to(base).as_posix() for path in find_files([base], exclude)]


def test_python_files_and_notebooks(tmp_path: Path) -> None:
    tree(tmp_path, "b.py", "a/c.pyi", "a/d.ipynb", "a/e.txt", "setup.cfg")
    assert found(tmp_path) == ["b.py", "a/c.pyi", "a/d.ipynb"]


def test_folders_that_hold_no_sources_of_the_project(tmp_path: Path) -> None:
    tree(tmp_path, "a.py", ".git/b.py", "x/.venv/c.py", "__pycache__/d.py", "env/lib/e.py")
    tree(tmp_path, ".ipynb_checkpoints/f.ipynb", "node_modules/g.py", "env/pyvenv.cfg")
    assert found(tmp_path) == ["a.py"]


def test_exclude(tmp_path: Path) -> None:
    tree(tmp_path, "a.py", "b/c.py", "b/d.py", "build/lib/e.py", "f_pb2.py")
    assert found(tmp_path, "b/c.py", "build/", "*_pb2.py") == ["a.py", "b/d.py"]
    assert found(tmp_path, "b*") == ["a.py", "f_pb2.py"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    tree(tmp_path, "out/a.py", "in/b.py")
    (tmp_path / "in/link.py").symlink_to(tmp_path / "out/a.py")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    assert found(tmp_path / "in") == ["b.py"]
    assert find_files([tmp_path / "in/link.py"]) == [tmp_path / "in/link.py"]


def test_files_that_are_given_are_taken_once(tmp_path: Path) -> None:
    tree(tmp_path, ".git/a", "b.py")
    given = [tmp_path / ".git/a", tmp_path / "b.py", tmp_path]
    assert find_files(given, ["b.py"]) == [tmp_path / ".git/a", tmp_path / "b.py"]


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        find_files([tmp_path / "no"])


def test_encodings_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    for data, encoding in (
        ("# é\r\nx = 1\r\n".encode(), "utf-8"),
        ("\ufeff# é\n".encode(), "utf-8-sig"),
        ("# coding: latin-1\n# é\n".encode("latin-1"), "iso-8859-1"),
    ):
        path.write_bytes(data)
        text, name = read_text(path)
        assert name == encoding
        write_text(path, text, name)
        assert path.read_bytes() == data


def test_modes_are_kept_and_nothing_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x\n", encoding="utf-8")
    path.chmod(0o751)
    write_text(path, "y\n")
    assert path.read_text(encoding="utf-8") == "y\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    tree(tmp_path, "a.py")
    link = tmp_path / "link.py"
    link.symlink_to("a.py")
    write_text(link, "y\n")
    assert link.is_symlink()
    assert (tmp_path / "a.py").read_text(encoding="utf-8") == "y\n"
