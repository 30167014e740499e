"""A process that is killed or interrupted at every file operation: the old file or
the new one, and nothing else after the next run."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant import files
from backquant.cli import main
from backquant.deploy import run
from backquant.deploy.target import check_place, staged
from backquant.errors import ArtifactError, ExportError
from backquant.files import replace_file, workspace

OPERATIONS = {"open", "fcntl.flock"} | {
    f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir", "chmod", "scandir", "listdir")
}
Action = Callable[[], Any]


def ended(action: Action, folder: Path, number: int, by: int = signal.SIGKILL) -> int | None:
    """The status of a child that gets ``by`` before its ``number``-th operation on a file of ``folder``;
    None where it made fewer. What it says on standard error is in ``said.txt`` beside the folder."""
    child = os.fork()
    if child:
        return _status(child)
    seen = 0

    def count(path: object) -> None:
        nonlocal seen
        if not isinstance(path, int) and not str(path).startswith(str(folder)):
            return
        seen += 1
        if seen == number:
            os.kill(os.getpid(), by)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in OPERATIONS and args:
            count(args[0] if isinstance(args[0], str | Path | int) else folder)

    def fsync(handle: int, real: Callable[[int], None] = os.fsync) -> None:
        count(handle)
        real(handle)

    status = 99
    try:
        os.dup2(os.open(folder.parent / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stdout = sys.stderr = open(2, "w")  # noqa: SIM115
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
        sys.addaudithook(hook)
        os.fsync = fsync
        action()
        status = 0 if seen >= number else 98
    except SystemExit as end:
        status = int(end.code or 0) if seen >= number else 98
    finally:
        files._leave()  # as at the exit of a process
        sys.stderr.flush()
        os._exit(status)


def _status(child: int) -> int | None:
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code == 98 else code


def crashes(action: Action, folder: Path, by: int = signal.SIGKILL, step: int = 1) -> Iterator[int]:
    """Once for each operation, after the child has ended there; the status of the child."""
    for number in range(1, 200, step):
        status = ended(action, folder, number, by)
        if status is None:
            assert number > 5  # it did count
            return
        yield status
    raise AssertionError("it does not end")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "of files").mkdir()
    return tmp_path / "of files"


@pytest.fixture(scope="module")
def quantized() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return backquant.quantize(model, backend="x86", calibration=[torch.randn(8, 4)])


def test_a_saved_model_is_the_old_one_or_the_new_one(folder: Path, quantized: Any) -> None:
    path = folder / "größe 1.bq"
    backquant.save(quantized, path)
    new = path.read_bytes()
    path.write_bytes(b"old")
    for status in crashes(lambda: backquant.save(quantized, path), folder):
        assert status == -signal.SIGKILL
        assert content(folder)[path.name] in (b"old", new)
        replace_file(path, b"old")  # the next run
        assert [item.name for item in folder.iterdir()] == [path.name]


def export(folder: Path, text: bytes, *, fails: bool = False) -> None:
    """What OpenVINO's target does: two files, the one that is named and its weights."""
    with staged(folder / "model.xml", []) as staging:
        staging.with_suffix(".bin").write_bytes(text)
        staging.write_bytes(text)
        if fails:
            raise ExportError("refused")


@pytest.mark.parametrize("next_run", ["writes", "fails"])
def test_two_files_belong_together(next_run: str, folder: Path) -> None:
    """Never one of the old files beside one of the new; the first to write goes on where it stopped."""
    old, new = ({"model.xml": text, "model.bin": text} for text in (b"old", b"new"))
    export(folder, b"old")
    seen = []
    for status in crashes(lambda: export(folder, b"new"), folder):
        assert status == -signal.SIGKILL
        found = content(folder)
        seen.append(found)
        assert found in (old, new) or "model.xml" not in found
        if next_run == "writes":
            export(folder, b"newer")
            assert set(content(folder).values()) == {b"newer"}
        else:
            with pytest.raises(ExportError):
                export(folder, b"newer", fails=True)
            assert content(folder) in (old, new)
        assert len(list(folder.iterdir())) == 2
        export(folder, b"old")
    assert old in seen
    assert new in seen


def test_what_cannot_be_moved_gives_the_old_files_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(folder, b"old")
    real = Path.replace
    for fails_at in range(4):
        left = [None] * fails_at

        def replace(path: Path, target: Path, left: list[None] = left) -> Path:
            if not left:
                left += [None] * 9
                raise OSError("quota")
            left.pop()
            return real(path, target)

        with monkeypatch.context() as patch, pytest.raises(ExportError, match="quota"):
            patch.setattr(Path, "replace", replace)
            export(folder, b"new")
        assert content(folder) == {"model.xml": b"old", "model.bin": b"old"}
        assert len(list(folder.iterdir())) == 2
    (folder / "model.bin").unlink()
    (folder / "model.bin").mkdir()
    with pytest.raises(ExportError, match="directory"):
        export(folder, b"new")
    assert content(folder) == {"model.xml": b"old"}
    assert (folder / "model.bin").is_dir()


def test_a_full_disk_is_not_said_to_be_the_models_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "check_operators", lambda *_: None)
    job: Any = SimpleNamespace()
    target: Any = SimpleNamespace(name="any", write=full)
    with pytest.raises(ExportError, match=r"model\.pt2 cannot be written: No space left"):
        run.run_export(job, target, folder / "model.pt2", None)
    assert not list(folder.iterdir())


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 999 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (999, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_library_that_does_not_say_why_it_cannot_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO's words for a full disk are "iostream error"; the system has better ones."""

    def write(_: object, path: Path) -> Any:
        path.write_bytes(bytes(990))
        raise RuntimeError("iostream error")

    monkeypatch.setattr(run, "check_operators", lambda *_: None)
    target: Any = SimpleNamespace(name="any", write=write)
    with pytest.raises(ExportError, match=r"model\.xml cannot be written: File too large\n"):
        run.run_export(SimpleNamespace(), target, folder / "model.xml", None)  # type: ignore[arg-type]
    assert not list(folder.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(OSError, match="File too large") as caught, workspace() as inner:
        write(None, inner / "model.bin")
    assert caught.value.filename == str(folder)
    assert "None" not in str(caught.value)
    assert not list(folder.iterdir())


def test_room_for_a_folder_and_nothing_in_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def full(path: Path, *args: Any) -> Any:
        if path.name == "lock":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, *args)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left") as caught:
        replace_file(folder / "model.bq", b"new")
    assert caught.value.filename == str(folder / "model.bq")
    assert not list(folder.iterdir())


def factory() -> Any:
    return nn.Sequential(nn.Linear(4, 4)), torch.zeros(1, 4)


def data() -> list[torch.Tensor]:
    return [torch.ones(2, 4)]


def test_ctrl_c_ends_with_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """… status 130, and no file but what is whole."""
    monkeypatch.setitem(sys.modules, "factory_of_crashes", sys.modules[__name__])
    words = (
        "quantize factory_of_crashes:factory --data factory_of_crashes:data --slower keep --json"
    )
    path, page = folder / "model.bq", folder / "report.html"
    more = ["--html", str(page), "-o", str(path)]
    monkeypatch.setattr(sys, "argv", ["backquant", *words.split(), *more])
    for status in crashes(main, folder, signal.SIGINT, step=9):
        assert status == 130
        assert (folder.parent / "said.txt").read_text() == "interrupted\n"
        assert set(folder.iterdir()) <= {path, page}
        if path.exists():
            backquant.load(path)
            path.unlink()


def test_many_write_one_name(folder: Path) -> None:
    """Six at once, one file each and two: all of one of them."""
    children = []
    for number in range(6):
        child = os.fork()
        if child == 0:
            try:
                text = str(number).encode() * 5000
                for _ in range(10):
                    export(folder, text)
                    replace_file(folder / "one", text)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [_status(child) for child in children] == [0] * 6
    found = content(folder)
    assert set(found) == {"one", "model.xml", "model.bin"} == {p.name for p in folder.iterdir()}
    assert found["model.xml"] == found["model.bin"]
    assert all(len(text) == 5000 and len(set(text)) == 1 for text in found.values())


def places(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Places for a file, each with whether it can be written."""
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    (folder / "target").mkdir()
    (folder / "link").symlink_to(folder / "target" / "model.bq")
    yield folder / "a b'c\"\n ü 模型.bq", True
    yield folder / ("x" * 255), True
    yield folder / "link", True
    yield folder / os.fsdecode(b"\xff.bq"), False
    yield folder / ("x" * 256), False
    yield folder / "loop", False
    yield folder / "pipe", False
    yield folder / "a\0b", False
    yield folder / "target", False
    yield folder / "link" / "model.bq", False
    yield Path("/proc/model.bq"), False


def test_names_and_kinds_of_files(folder: Path, quantized: Any) -> None:
    for path, can in places(folder):
        before = {item.name for item in folder.rglob("*")}
        if can:
            backquant.save(quantized, path)
            assert path.is_file()
            backquant.load(path)
        else:
            with pytest.raises(ArtifactError):
                backquant.save(quantized, path)
            assert {item.name for item in folder.rglob("*")} == before
    with pytest.raises(ExportError, match="File name too long"):
        path = folder / ("x" * 256)
        check_place(path, overwrite=False)
        with staged(path, []) as staging:
            staging.touch()
    assert (folder / "link").is_symlink()
    assert (folder / "target" / "model.bq").is_file()
    assert not list(folder.rglob(".backquant*"))
