from __future__ import annotations

import json
import os
import pickle
import stat
import sys
from pathlib import Path

import pytest
import torch

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    get_backend_config,
    normal_form,
)
from backquant.backend_config.files import dumps, load_with_places, loads, save_file
from backquant.errors import SpecError

MINE = BackendConfig("mine").set_backend_pattern_config(BackendPatternConfig(torch.add))
HEAD = "schema_version: 1\nname: child\n"


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json", ".YAML"])
def test_save_and_load(tmp_path, suffix):
    path = tmp_path / f"mine{suffix}"
    save_file(MINE, path)
    assert BackendConfig.load(path) == MINE
    assert BackendConfig.load(str(path)) == MINE
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_json_files_are_json(tmp_path):
    save_file(MINE, tmp_path / "mine.json")
    assert json.loads((tmp_path / "mine.json").read_text())["name"] == "mine"


@pytest.mark.parametrize("name", ["mine", "mine.toml", "mine.py"])
def test_other_suffixes(tmp_path, name):
    for action in (lambda path: save_file(MINE, path), BackendConfig.load):
        with pytest.raises(SpecError, match=r"ends in \.yaml, \.yml or \.json"):
            action(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    save_file(MINE, path)
    before = path.read_bytes()
    bad = BackendConfig("bad").set_backend_pattern_config(BackendPatternConfig(lambda x: x))
    with pytest.raises(SpecError):
        save_file(bad, path)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpecError, match="No space left") as caught:
        save_file(BackendConfig("other"), path)
    assert caught.value.where == str(path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(SpecError, match="cannot be written"):
        save_file(MINE, tmp_path / "no" / "mine.yaml")


def test_a_folder_in_place_of_the_file(tmp_path):
    (tmp_path / "mine.yaml").mkdir()
    with pytest.raises(SpecError, match="cannot be written"):
        save_file(MINE, tmp_path / "mine.yaml")
    with pytest.raises(SpecError, match="cannot be read"):
        BackendConfig.load(tmp_path / "mine.yaml")
    assert [item.name for item in tmp_path.iterdir()] == ["mine.yaml"]


def test_permissions(tmp_path):
    path = tmp_path / "mine.yaml"
    save_file(MINE, path)
    fresh = tmp_path / "fresh"
    fresh.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(fresh.stat().st_mode)
    path.chmod(0o640)
    save_file(MINE, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_missing_file_names_its_neighbours(tmp_path):
    save_file(MINE, tmp_path / "mine.yaml")
    with pytest.raises(SpecError, match="no such file") as caught:
        BackendConfig.load(tmp_path / "mien.yaml")
    assert caught.value.fix == "files there: mine.yaml"


def test_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(SpecError, match="is not UTF-8"):
        BackendConfig.load(tmp_path / "x.yaml")


def test_text_that_utf8_cannot_carry(tmp_path):
    with pytest.raises(SpecError, match="cannot be stored as UTF-8"):
        save_file(BackendConfig("\ud800"), tmp_path / "x.json")


def test_unknown_format():
    with pytest.raises(SpecError, match="unknown format"):
        dumps(MINE, "toml")


def test_extends_a_backend(write):
    path = write("child.yaml", HEAD + "extends: x86\nremove: [torch.nn.Conv1d]\n")
    child, x86 = BackendConfig.load(path), get_backend_config("x86")
    assert set(x86.entries) - set(child.entries) == {normal_form(torch.nn.Conv1d)}
    assert child.defaults == x86.defaults


def test_extends_a_file_relative_to_this_one(tmp_path, write):
    (tmp_path / "base").mkdir()
    write("base/one.json", dumps(MINE, "json"))
    write("base/two.yaml", HEAD + "extends: one.json\nentries: [{pattern: torch.mul}]\n")
    path = write("top.yaml", HEAD + "extends: base/two.yaml\nentries: [{pattern: torch.sub}]\n")
    loaded = load_with_places(path)
    assert [str(p) for p in loaded.config.entries] == ["torch.add", "torch.mul", "torch.sub"]
    files = [Path(loaded.places[pattern].tree.file).name for pattern in loaded.config.entries]
    assert files == ["one.json", "two.yaml", "top.yaml"]


def test_allow_holds_for_extended_files(tmp_path, write, monkeypatch):
    write("ext_ops.py", "def fuse(is_qat, a, b):\n    return a\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    write(
        "base.yaml",
        HEAD + "entries:\n- {pattern: [torch.add, torch.mul], fuser_method: ext_ops.fuse}\n",
    )
    path = write("top.yaml", HEAD + "extends: base.yaml\n")
    with pytest.raises(SpecError, match="outside of the allowed packages") as caught:
        BackendConfig.load(path)
    assert "base.yaml:4" in caught.value.where
    assert BackendConfig.load(path, allow=("ext_ops",)).configs[0].fuser_method.__name__ == "fuse"


def test_cycles(write):
    write("a.yaml", HEAD + "extends: b.yaml\n")
    write("b.yaml", HEAD + "extends: c.yaml\n")
    path = write("c.yaml", HEAD + "extends: ./a.yaml\n")
    with pytest.raises(SpecError) as caught:
        BackendConfig.load(path)
    assert caught.value.what == "a file extends itself: c.yaml → a.yaml → b.yaml → c.yaml"
    assert caught.value.where.endswith("b.yaml:3: extends")
    itself = write("self.yaml", HEAD + "extends: self.yaml\n")
    with pytest.raises(SpecError, match="extends itself"):
        BackendConfig.load(itself)


@pytest.mark.parametrize(
    ("extends", "message", "fix"),
    [
        ("x68", "backend 'x68' is not supported", "did you mean 'x86'?"),
        ("gone.yaml", "gone.yaml: no such file", "files there: child.yaml"),
        ("dir/x", "dir/x: a spec file ends in .yaml", "x.yaml"),
    ],
)
def test_extending_what_is_not_there(write, extends, message, fix):
    path = write("child.yaml", HEAD + f"\nextends: {extends}\n")
    with pytest.raises(SpecError) as caught:
        BackendConfig.load(path)
    assert message in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.where.endswith("child.yaml:4: extends")


def test_problems_of_an_extended_file_name_that_file(write):
    write("base.yaml", "schema_version: 1\n")
    path = write("child.yaml", HEAD + "extends: base.yaml\n")
    with pytest.raises(SpecError) as caught:
        BackendConfig.load(path)
    assert caught.value.where.endswith("base.yaml:1: name")


def test_loads_extends_relative_to_the_working_directory(tmp_path, write, monkeypatch):
    write("one.yaml", dumps(MINE))
    monkeypatch.chdir(tmp_path)
    assert loads(HEAD + "extends: one.yaml\n").configs == MINE.configs


def test_get_backend_config_reads_files(tmp_path):
    save_file(MINE, tmp_path / "mine.yaml")
    assert get_backend_config(tmp_path / "mine.yaml") == MINE


@pytest.mark.parametrize("format", ["yaml", "json"])
def test_a_load_reads_each_value_once(tmp_path, format):
    """At most 20,000 calls for the 191 entries of x86, once what their names lead to is known."""
    path = tmp_path / f"x86.{format}"
    get_backend_config("x86").save(path)
    BackendConfig.load(path)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        BackendConfig.load(path)
    finally:
        sys.setprofile(None)
    assert calls <= 20_000


def test_loaded_descriptions_share_nothing_with_what_they_extend(write):
    path = write("mine.yaml", HEAD + "extends: x86\n")
    mine = BackendConfig.load(path)
    mine.configs[0].dtype_configs.clear()
    assert mine != get_backend_config("x86")
    assert BackendConfig.load(path).set_name("x86") == get_backend_config("x86")


def test_a_pickled_description_has_entries_of_its_own(write):
    body = "dtype_configs: {a: {input_dtype: quint8}}\n"
    body += "entries: [{patterns: [torch.add, torch.mul], dtype_configs: [a]}]\n"
    first, second = pickle.loads(
        pickle.dumps(BackendConfig.load(write("mine.yaml", HEAD + body)))
    ).configs
    first.dtype_configs[0].is_dynamic = True
    assert second.dtype_configs[0].is_dynamic is None
