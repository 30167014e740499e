"""A description from a stranger: what it names, what it extends, how large it may be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from backquant.backend_config import BackendConfig, get_backend_config, list_backends
from backquant.backend_config.files import dumps, loads
from backquant.errors import SpecError

CALLED = [
    "torch.serialization.load",
    "torch._C._abort",
    "torch.fx.graph_module._exec_with_source",
    "torch.load",
    "torch.hub.load",
    "torch.compile",
    "torch.from_file",
    "torch.ops.load_library",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "torch.fx.GraphModule",
    "torch.multiprocessing.spawn",
    "torch.set_default_dtype",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.functional.handle_torch_function",
    "operator.call",
    "operator.methodcaller",
    "builtins.eval",
    "backquant.load",
    "backquant.quantize",
    "backquant.cli.app.app",
    "torch.Tensor.set_",
    "torch.Tensor.register_hook",
    "torch.ops.aten._reshape_alias.default",
]


MINE = {"schema_version": 1, "name": "mine"}


def with_fuser(name: str) -> str:
    entry = {"pattern": ["torch.nn.Linear", "torch.nn.ReLU"], "fuser_method": name}
    return json.dumps({**MINE, "entries": [entry]})


@pytest.mark.parametrize("name", CALLED)
def test_what_is_no_module_operator_or_fuser_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=re.escape(name)) as caught:
        loads(with_fuser(name), "json")
    assert "fuser_method" in caught.value.where


@pytest.mark.parametrize("name", list_backends())
def test_every_description_of_ours_comes_back(name: str) -> None:
    config = get_backend_config(name)
    assert loads(dumps(config, "json"), "json") == config


LATE = """
import sys
from backquant.backend_config.files import loads
from backquant.errors import SpecError
before = set(sys.modules)
for name in ("torch._inductor.compile_fx.compile_fx", "torch.utils.cpp_extension.load", "torch.onnx.export",
             "torch.distributed.rpc.rpc_sync", "torch.utils.tensorboard.SummaryWriter", "torch.ao.x.y"):
    try:
        loads("{schema_version: 1, name: a, entries: [{pattern: %s}]}" % name)
    except SpecError:
        continue
    print("taken", name)
print(sorted(m for m in set(sys.modules) - before if m.startswith("torch")))
"""


def test_nothing_of_torch_is_imported_for_a_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "[]\n"


def test_files_extend_files_of_their_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    BackendConfig("base").save(tmp_path / "base.yaml")
    BackendConfig("base").save(tmp_path / "inner" / "base.yaml")
    path = tmp_path / "inner" / "mine.yaml"
    path.write_text("schema_version: 1\nname: mine\nextends: base.yaml\n")
    assert BackendConfig.load(path).name == "mine"
    for outside in ("../base.yaml", str(tmp_path / "base.yaml")):
        path.write_text(f"schema_version: 1\nname: mine\nextends: {outside}\n")
        with pytest.raises(SpecError, match="outside of the folder"):
            BackendConfig.load(path)
        assert BackendConfig.load(path, allow=(f"{tmp_path}/",)).name == "mine"
    (tmp_path / "inner" / "link.yaml").symlink_to(tmp_path / "base.yaml")
    path.write_text("schema_version: 1\nname: mine\nextends: link.yaml\n")
    with pytest.raises(SpecError, match="outside of the folder"):
        BackendConfig.load(path)


def test_loops_pipes_and_large_files_end(tmp_path: Path) -> None:
    for one, two in (("a", "b"), ("b", "a")):
        text = f"schema_version: 1\nname: {one}\nextends: {two}.yaml\n"
        (tmp_path / f"{one}.yaml").write_text(text)
    (tmp_path / "large.yaml").write_text("# " + "x" * (10 << 20))
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for name in ("a", "large", "pipe", "zero"):
        with pytest.raises(SpecError):
            BackendConfig.load(tmp_path / f"{name}.yaml")


def test_a_billion_laughs_are_counted() -> None:
    lines = ["schema_version: 1", "name: a", "a0: &a0 [lol, lol]"]
    lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 30)]
    with pytest.raises(SpecError, match="values"):
        loads("\n".join(lines))
    with pytest.raises(SpecError):
        loads("[" * 100_000)


def test_what_is_wrong_thousands_of_times_is_told_shortly(snapshot: Callable[..., None]) -> None:
    """Unknown fields ask for the nearest word each; patterns are walked; names are printed."""
    keys = "".join(f"k{number}: 1\n" for number in range(20_000))
    texts = {
        "fields": ("schema_version: 1\nname: a\n" + keys, "yaml"),
        "merge": ("schema_version: 1\nname: a\n<<: {a: 1}\n", "yaml"),
        "pattern": (
            json.dumps({**MINE, "entries": [{"pattern": ["torch.relu"] * 20_000}]}),
            "json",
        ),
        "surrogate": (json.dumps({"schema_version": 1, "name": "\ud800"}), "json"),
    }
    for name, (text, format) in texts.items():
        with pytest.raises(SpecError) as caught:
            loads(text, format)
        snapshot(name, str(caught.value)[:400])


BY_HAND = {
    "known: schema_version": lambda *_: loads("schema_version: 1\nname: a\n", "yaml"),
}
