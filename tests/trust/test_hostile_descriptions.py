"""A description of a stranger, kind by kind: each is refused with our error, or read, and soon.

Nothing here may be imported, run, opened outside of its folder, or take more than a second.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import backquant
from backquant.backend_config import BackendConfig
from backquant.backend_config.files import check_file, loads
from backquant.errors import SpecError

SECONDS = 5.0  # of CPU; most take some milliseconds
MINE: dict[str, Any] = {"schema_version": 1, "name": "mine"}
LINEAR = "torch.nn.Linear"

#: Fields of an entry that name something, with the rest of the entry.
FIELDS: dict[str, dict[str, Any]] = {
    "pattern": {},
    "root_module": {"pattern": LINEAR},
    "qat_module": {"pattern": LINEAR},
    "reference_quantized_module": {"pattern": LINEAR},
    "fused_module": {"pattern": LINEAR},
    "fuser_method": {"pattern": [LINEAR, "torch.nn.ReLU"]},
    "root_node_getter": {"pattern": LINEAR},
    "extra_inputs_getter": {"pattern": LINEAR},
}
NAMES = [
    "os.system",
    "torch.os.system",
    "torch.nn.os.system",
    "torch.nn.modules.sys.exit",
    "torch.hub.urlopen",
    "torch.hub.load_state_dict_from_url",
    "torch.serialization.load",
    "torch.serialization.pickle.loads",
    "torch._C._abort",
    "torch._C._cuda_init",
    "torch.fx.graph_module._exec_with_source",
    "torch.utils.cpp_extension.load_inline",
    "torch.onnx.export",
    "torch.distributed.rpc.rpc_sync",
    "torch.ops.load_library",
    "torch.classes.load_library",
    "torch.classes.loaded_libraries.add",
    "torch.set_num_threads",
    "torch.nn.Linear.forward",
    "torch.nn.Linear.__init__",
    "torch.nn.Linear.__class__.__base__",
    "torch.nn.Linear.mro",
    "torch.nn.Module.load_state_dict",
    "builtins.eval",
    "builtins.open",
    "builtins.__import__",
    "operator.attrgetter",
    "operator.methodcaller",
    "backquant.files.replace_file",
    "backquant.cli.app.app",
    "backquant.artifact.file.os.remove",
    "importlib.import_module",
    "subprocess.Popen",
    "antigravity.webbrowser",
    "torch..nn",
    ".",
    "torch.",
    "torch.nn.Linear\n",
    "torch.nn.\u212ainear",
    "torch.nn.Lin\u200bear",
    "\u0442orch.nn.Linear",
    "torch/nn/Linear",
    "torch.nn.Linear()",
    "lambda: 0",
    "torch.nn." + "a" * 100_000,
    "torch." + "nn." * 30_000 + "Linear",
]


def refused(text: str, format: str = "json") -> SpecError:
    """The error of ours; within the time."""
    loaded, start = set(sys.modules), time.process_time()
    with pytest.raises(SpecError) as caught:
        loads(text, format)  # type: ignore[arg-type]
    assert time.process_time() - start < SECONDS
    assert not {name for name in set(sys.modules) - loaded if not name.startswith("backquant.")}
    assert len(str(caught.value)) < 100_000
    return caught.value


@pytest.mark.parametrize("field", FIELDS)
def test_a_name_of_no_kind_is_refused_in_each_field(field: str) -> None:
    """48 names in eight fields."""
    for name in NAMES:
        refused(json.dumps({**MINE, "entries": [{**FIELDS[field], field: name}]}))


@pytest.mark.parametrize("format", ["json", "yaml"])
def test_names_are_names_in_other_places(format: str) -> None:
    """Where a description names an operator, a backend, an engine, an observer, a dtype, a quantity."""
    for name in ("os.system", "torch.hub.load", "torch.nn.Linear.__class__", "../../x", "\x00"):
        entry = {"pattern": LINEAR}
        for place in (
            {"extends": name},
            {"extends": f"{name}.yaml"},
            {"remove": [name]},
            {"defaults": {"activation": {"observer": name}}},
            {"defaults": {"leave_float": [{"operators": [name]}]}},
            {"qdq": {"leave_float": [name]}},
            {"dtype_configs": {"a": {"input_dtype": name}}},
            {"entries": [{**entry, "dtype_configs": [name]}]},
            {"entries": [{**entry, "where": {name: 1}}]},
            {"entries": [{"pattern": {"nodes": {"a": {"op": name}}}}]},
            {"entries": [{**entry, "overwrite_output_observer": {"factory": name}}]},
        ):
            text = json.dumps({**MINE, **place})
            refused(text, format)


EXPRESSIONS = [
    "__import__('os').system('true')",
    "().__class__.__bases__[0].__subclasses__()",
    "(lambda: 1)()",
    "[x for x in dims]",
    "open('x')",
    "dims.__class__",
    "input.dims.__len__()",
    "f'{groups}'",
    "groups if groups else 1",
    "groups := 1",
    "groups and 1",
    "groups < 3",
    "9**9**9",
    "2**2**2**2**2**2",
    "2**10000000000",
    "10**400",
    "groups ** groups",
    "groups << 4000000000",
    "groups % 2",
    "groups // 2",
    "~groups",
    "product(*dims)",
    "product(dims, dims)",
    "product(x=dims)",
    "print(groups)",
    "eval(groups)",
    "dims[::2]",
    "dims[groups]",
    "dims[1.5]",
    "dims['a']",
    "dims[2**1000:]*",
    "1j",
    "'a' * 4000000000",
    "b'a'",
    "...",
    "None",
    "True",
    "await groups",
    "yield groups",
    "groups;1",
    "groups\n1",
    "#",
    "",
    " ",
    "(" * 200 + "groups" + ")" * 200 + "(",
    "-" * 399,
    "-" * 390 + "groups",
    "sum(" * 90,
    "groups" + "[0]" * 200,
    "1" * 401,
    "0" * 390 + "1",
    "1_" * 100,
    "groups\x00",
    "\ud800",
    "gr\u03bfups",
    "\u0661",
    "\u00b2",
]


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=range(len(EXPRESSIONS)))
def test_a_condition_is_no_program(expression: str) -> None:
    start = time.process_time()
    with pytest.raises(SpecError):
        loads(
            json.dumps({**MINE, "entries": [{"pattern": LINEAR, "where": {expression: 1}}]}), "json"
        )
    assert time.process_time() - start < SECONDS


LARGE = [
    "+".join(["groups"] * 57),
    "2**1000 * 2**1000 * 2**1000 * groups",
    "groups * 1e308 * 1e308",
    "groups / 0",
    "9" * 390,
    "-" * 380 + "1",
    "product(" * 40 + "dims" + ")" * 40,
    "dims" + "[0:]" * 90,
]


@pytest.mark.parametrize("expression", LARGE, ids=range(len(LARGE)))
def test_a_condition_of_large_numbers_is_decided(expression: str) -> None:
    """What can be written is computed, or refused, at once: by the description, and by a model."""
    entry = {"pattern": LINEAR, "observation_type": "OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT"}
    entry["where"] = {expression: {"max": 7}}  # type: ignore[assignment]
    entry["dtype_configs"] = [  # type: ignore[assignment]
        {"input_dtype": "quint8", "output_dtype": "quint8", "weight_dtype": "qint8"}
    ]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    backquant.explain(model, torch.ones(1, 2))  # imports
    start = time.process_time()
    try:
        config = loads(json.dumps({**MINE, "entries": [entry]}), "json")
        assert backquant.explain(model, torch.ones(1, 2), backend=config).rows
    except SpecError:
        pass
    assert time.process_time() - start < SECONDS


FORMS = {
    "a key twice": '{"schema_version": 1, "name": "a", "name": "b"}',
    "a key twice, escaped": '{"schema_version": 1, "name": "a", "n\\u0061me": "b"}',
    "a key twice within": '{"schema_version": 1, "name": "a", "qdq": {"bias": true, "bias": true}}',
    "no number": '{"schema_version": NaN, "name": "a"}',
    "infinity": '{"schema_version": Infinity, "name": "a"}',
    "a large exponent": '{"schema_version": 1e999999999, "name": "a"}',
    "digits": '{"schema_version": ' + "9" * 100_000 + ', "name": "a"}',
    "minus zero": '{"schema_version": -0, "name": "a"}',
    "one as text": '{"schema_version": "1", "name": "a"}',
    "one as a truth": '{"schema_version": true, "name": "a"}',
    "one as its float": '{"schema_version": 1.0, "name": "a"}',
    "one as a float": '{"schema_version": 1.5, "name": "a"}',
    "a comma": '{"schema_version": 1, "name": "a",}',
    "two documents": '{"schema_version": 1, "name": "a"} {}',
    "a comment": '{"schema_version": 1, /* */ "name": "a"}',
    "half a pair": '{"schema_version": 1, "name": "\\ud800"}',
    "a null character": '{"schema_version": 1, "na\x00me": "a"}',
    "a line in a text": '{"schema_version": 1, "name": "a\nb"}',
    "no end": '{"schema_version": 1, "name": "a',
    "a bad escape": '{"schema_version": 1, "name": "\\x41"}',
    "lists": "[" * 200_000,
    "objects": '{"a":' * 100_000,
    "closed lists": "[" * 90 + "]" * 90,
    "nothing": "",
    "spaces": " " * 900_000,
    "too much": '"' + "a" * 1_000_001 + '"',
    "many values": "[" + "1," * 100_000 + "1]",
    "many names": json.dumps(
        {**MINE, "entries": [{"pattern": f"torch.x{n}"} for n in range(9000)]}
    ),
    "one pattern often": json.dumps({**MINE, "entries": [{"pattern": LINEAR}] * 9000}),
    "another version": '{"schema_version": 2, "name": "a"}',
    "a list": "[]",
    "a name that is none": '{"schema_version": 1, "name": {}}',
    "prototype": '{"schema_version": 1, "name": "a", "__proto__": {}, "__class__": 1}',
}
YAML_FORMS = {
    "a key twice": "schema_version: 1\nname: a\nname: b\n",
    "an object": "schema_version: 1\nname: !!python/object/apply:os.system [true]\n",
    "a name of Python": "schema_version: 1\nname: !!python/name:os.system\n",
    "a module": "schema_version: 1\nname: !!python/module:os\n",
    "an object in a key": "schema_version: 1\n!!python/tuple [a]: 1\n",
    "bytes": "schema_version: 1\nname: !!binary aGk=\n",
    "a set": "schema_version: 1\nname: a\nentries: !!set {a}\n",
    "an ordered map": "schema_version: 1\nname: a\nentries: !!omap [a: 1]\n",
    "a tag of its own": "%TAG ! tag:x,2000:\n---\nschema_version: 1\nname: !x a\n",
    "a tag that is none": "schema_version: 1\nname: !<> a\n",
    "merging": "schema_version: 1\nname: a\n<<: {entries: []}\n",
    "an alias of nothing": "schema_version: 1\nname: *a\n",
    "an alias of itself": "schema_version: 1\nname: a\nentries: &a [*a]\n",
    "a map within itself": "schema_version: 1\nname: a\ndefaults: &a {activation: *a}\n",
    "an anchor twice": "schema_version: 1\nname: &a a\nengine: &a [b]\nextends: *a\n",
    "laughs": "a: &a ["
    + "x," * 500
    + "x]\n"
    + "b: &b ["
    + "*a," * 500
    + "*a]\nc: ["
    + "*b," * 9
    + "*b]",
    "two documents": "schema_version: 1\nname: a\n---\nname: b\n",
    "a directive": "%YAML 9.9\n---\nschema_version: 1\nname: a\n",
    "lists": "[" * 5_000,
    "dashes": "- " * 5_000,
    "indented": "\n".join(" " * depth + "a:" for depth in range(600)),
    "maps": "{a: " * 5_000,
    "a long key": "? " + "a" * 100_000 + "\n: 1\n",
    "a key that is a list": "? [a]\n: 1\n",
    "a tab": "schema_version: 1\n\tname: a\n",
    "a control character": "schema_version: 1\nname: \x07\n",
    "a surrogate": 'schema_version: 1\nname: "\\ud800"\n',
    "a large code": 'schema_version: 1\nname: "\\UFFFFFFFF"\n',
    "half an escape": 'schema_version: 1\nname: "\\U0000"\n',
    "octal": "schema_version: 0o1\nname: a\n",
    "a date": "schema_version: 2001-01-01\nname: a\n",
    "yes": "schema_version: yes\nname: a\n",
    "sixty": "schema_version: 1:00\nname: a\n",
    "digits": "schema_version: " + "9" * 100_000 + "\nname: a\n",
    "no number": "schema_version: .nan\nname: a\n",
    "folded": "schema_version: 1\nname: >99\n a\n",
    "comments only": "# a\n" * 1000,
    "many values": "[" + "1," * 50_000 + "1]",
    "half a byte": "schema_version: 1\nname: \ud800\n",
    "marks": "\ufeff" * 3 + "schema_version: 1\nname: {}\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_description_in_json(form: str) -> None:
    refused(FORMS[form])


@pytest.mark.parametrize("form", YAML_FORMS)
def test_what_is_no_description_in_yaml(form: str) -> None:
    refused(YAML_FORMS[form], "yaml")


def put(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """``data`` with another value there."""
    if not path:
        return value
    made = dict(data) if isinstance(data, dict) else list(data)
    made[path[0]] = put(data[path[0]], path[1:], value)
    return made


WHOLE: dict[str, Any] = {
    **MINE,
    "defaults": {"activation": {"observer": "histogram", "eps": "2**-12", "quant_min": 0}},
    "dtype_configs": {
        "static": {
            "input_dtype": {"dtype": "quint8", "scale_min_lower_bound": "2**-12"},
            "output_dtype": "quint8",
            "weight_dtype": {"dtype": "qint8", "granularity": "per_group(size=32)"},
            "tolerance": {"steps": 1, "reason": "so"},
            "table_entries": 257,
            "rounding": "half_even",
        }
    },
    "entries": [
        {
            "pattern": [LINEAR, "torch.nn.ReLU"],
            "dtype_configs": ["static"],
            "where": {"rank": {"max": 4}, "any": [{"batch": 1}]},
            "num_tensor_args_to_observation_type": {},
            "input_type_to_index": {"weight": 1},
        }
    ],
}


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    found = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, (dict, list)):
            found += places(value, (*path, key))
    return found


ODD: list[Any] = [
    None,
    True,
    -1,
    2**63,
    10**300,
    1e308,
    "",
    "2**99999999",
    "2**-\u0661",
    "per_group(size=-1)",
    "per_group(size=" + "9" * 300 + ")",
    "\x00",
    "a" * 50_000,
    [],
    [[[]]],
    {},
    {"": ""},
    {"a" * 9_000: 1},
    [LINEAR] * 300,
]


@pytest.mark.parametrize("path", places(WHOLE), ids=lambda path: ".".join(map(str, path)))
def test_any_value_in_any_place_is_read_or_refused(path: tuple[Any, ...]) -> None:
    """19 odd values at each place of a description."""
    start = time.process_time()
    for value in ODD:
        try:
            loads(json.dumps(put(WHOLE, path, value)), "json")
        except SpecError as error:
            assert len(str(error)) < 100_000
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_no_chain_of_files_leads_out_or_round(suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    BackendConfig("base").save(tmp_path / f"base.{suffix}")
    (folder / "out").symlink_to(tmp_path)
    (folder / f"self.{suffix}").symlink_to(f"self.{suffix}")
    (folder / f"sub.{suffix}").mkdir()
    (folder / f"bytes.{suffix}").write_bytes(b"\xff\xfe\x00")
    for number in range(200):
        data = {**MINE, "extends": f"n{number + 1}.{suffix}"}
        (folder / f"n{number}.{suffix}").write_text(json.dumps(data))
    for number in range(3):
        data = {**MINE, "extends": f"./r{(number + 1) % 3}.{suffix}"}
        (folder / f"r{number}.{suffix}").write_text(json.dumps(data))
    path = folder / f"mine.{suffix}"
    for extends in (
        f"../base.{suffix}",
        f"out/base.{suffix}",
        f"./../inner/../base.{suffix}",
        f"{tmp_path}/base.{suffix}",
        f"/proc/self/environ.{suffix}",
        f"~/base.{suffix}",
        f"file://{tmp_path}/base.{suffix}",
        f"self.{suffix}",
        f"sub.{suffix}",
        f"bytes.{suffix}",
        f"mine.{suffix}",
        f"n0.{suffix}",
        f"r0.{suffix}",
        f"a\x00.{suffix}",
        f"{'a' * 300}.{suffix}",
        f"{'a/' * 3000}b.{suffix}",
        f"\ud800.{suffix}",
        f"none.{suffix}",
        "con.txt",
        "/dev/stdin",
    ):
        path.write_text(json.dumps({**MINE, "extends": extends}))
        start = time.process_time()
        with pytest.raises(SpecError):
            BackendConfig.load(path)
        assert check_file(path)
        assert time.process_time() - start < SECONDS
