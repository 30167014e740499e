"""Graph patterns and their ports in spec files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backquant.backend_config import (
    AnyOrder,
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    GraphPattern,
    MatchAllNode,
    NormalPattern,
    PatternNode,
    Port,
    Value,
)
from backquant.backend_config.derived import document_of, support_rows
from backquant.backend_config.diff import diff
from backquant.backend_config.files import dumps, loads
from backquant.backend_config.import_paths import SpecFileError
from backquant.errors import SpecError
from backquant.pages.text import render

SWISH = """\
schema_version: 1
name: mine
entries:
- pattern:
    name: swish
    inputs: [x]
    nodes:
    - {name: gate, op: torch.sigmoid, arguments: [x]}
    - {name: out, op: torch.mul, arguments: [x, gate], any_order: true}
  dtype_configs: [{input_dtype: quint8, output_dtype: quint8}]
  ports: {x: activation, out: {shares_with: x}}
"""


def swish() -> BackendPatternConfig:
    nodes = {"gate": (torch.sigmoid, "x"), "out": (AnyOrder(torch.mul), "x", "gate")}
    return (
        BackendPatternConfig(GraphPattern(["x"], nodes, name="swish"))
        .add_dtype_config(DTypeConfig(torch.quint8, torch.quint8))
        .set_ports({"x": "activation", "out": Port(shares_with="x")})
    )


def everything() -> BackendConfig:
    literals = GraphPattern(
        ["x"],
        {
            "fc": (nn.Linear, "x"),
            "half": (AnyOrder(torch.mul), "fc", 0.5),
            "scaled": (torch.div, "fc", math.sqrt(2)),
            "erf": (torch.erf, "scaled"),
            "typed": ("to", "erf", torch.float32),
            "mean": ("mean", "typed", MatchAllNode, True),
            "sum": (torch.add, "mean", "half"),
            "none": (torch.clamp, "sum", None, 1),
            "out": (torch.nn.functional.gelu, "none", Value("tanh")),
        },
    )
    shared = (PatternNode(nn.ReLU, None, "module"), PatternNode(torch.add, (0, 0), "function"))
    entry = (
        BackendPatternConfig(literals)
        ._set_root_node_getter("fc")
        ._set_extra_inputs_getter(["x"])
        .set_ports({"x": "float"})
    )
    free = BackendPatternConfig(GraphPattern([], {"a": "relu", "out": (torch.tanh, "a")}))
    unnamed = BackendPatternConfig(NormalPattern(shared))
    return BackendConfig("mine").set_backend_pattern_configs([swish(), entry, free, unnamed])


def test_a_file_says_what_python_says() -> None:
    assert loads(SWISH) == BackendConfig("mine").set_backend_pattern_config(swish())


@pytest.mark.parametrize("format", ["yaml", "json"])
def test_text_round_trip(format: Any) -> None:
    config = everything()
    again = loads(dumps(config, format), format)
    assert again == config
    assert [entry.pattern for entry in again.configs] == [e.pattern for e in config.configs]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_file_round_trip(tmp_path: Path, suffix: str) -> None:
    config = everything()
    config.save(tmp_path / f"mine.{suffix}")
    assert BackendConfig.load(tmp_path / f"mine.{suffix}") == config


def test_dict_round_trip() -> None:
    config = everything()
    assert BackendConfig.from_dict(config.to_dict()) == config


HEAD = "schema_version: 1\nname: mine\nentries:\n- pattern:\n    inputs: [x]\n    nodes:\n"
BAD = {
    "unknown name": (
        HEAD + "    - {name: out, op: torch.relu, arguments: [y]}\n",
        "<text>:7: entries[0].pattern.nodes[0]: 'out' reads 'y', which is neither an input nor a "
        "node; Value('y') for the text itself",
    ),
    "two outputs": (
        HEAD
        + "    - {name: a, op: torch.relu, arguments: [x]}\n"
        + "    - {name: b, op: torch.tanh, arguments: [x]}\n",
        "<text>:6: entries[0].pattern.nodes: two outputs, 'a' and 'b': a pattern computes one "
        "value; leave it out, or name it among the arguments of a later node",
    ),
    "a name twice": (
        HEAD
        + "    - {name: a, op: torch.relu, arguments: [x]}\n"
        + "    - {name: a, op: torch.tanh, arguments: [a]}\n",
        "<text>:8: entries[0].pattern.nodes[1].name: the name 'a' stands twice",
    ),
    "an unknown operator": (
        HEAD + "    - {name: a, op: torch.relyou, arguments: [x]}\n",
        '<text>:7: entries[0].pattern.nodes[0]: "torch.relyou": torch has no "relyou"; did you mean '
        '"torch.relu"?',
    ),
    "an unknown field": (
        HEAD + "    - {name: a, op: torch.relu, argument: [x]}\n",
        '<text>:7: entries[0].pattern.nodes[0].argument: unknown field; did you mean "arguments"?',
    ),
    "a list among the arguments": (
        HEAD + "    - {name: a, op: torch.relu, arguments: [[x]]}\n",
        "<text>:7: entries[0].pattern.nodes[0].arguments[0]: expected a name, a literal, "
        "MatchAllNode, {text: …} or {constant: …}, got ['x']",
    ),
    "an unknown port": (
        HEAD + "    - {name: a, op: torch.relu, arguments: [x]}\n  ports: {y: weight}\n",
        "<text>:8: entries[0].ports: the pattern has no 'y' there; one of 'x', 'a'",
    ),
    "an unknown role": (
        HEAD + "    - {name: a, op: torch.relu, arguments: [x]}\n  ports: {x: wieght}\n",
        "<text>:8: entries[0].ports.x: 'wieght' is not one of the values allowed here; did you mean "
        '"weight"?',
    ),
    "ports of a sequence": (
        "schema_version: 1\nname: mine\nentries:\n- pattern: torch.relu\n  ports: {x: weight}\n",
        "<text>:5: entries[0].ports: only a GraphPattern has ports",
    ),
    "an unknown root": (
        HEAD + "    - {name: a, op: torch.relu, arguments: [x]}\n  root_node_getter: b\n",
        "<text>:8: entries[0].root_node_getter: the pattern has no 'b' there",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_line_and_field(name: str) -> None:
    text, expected = BAD[name]
    with pytest.raises(SpecFileError) as caught:
        loads(text)
    assert str(caught.value.problems[0]).startswith(expected)


def test_a_number_without_spelling_is_refused() -> None:
    entry = BackendPatternConfig(GraphPattern(["x"], {"out": (torch.add, "x", math.inf)}))
    with pytest.raises(SpecError, match="cannot be stored"):
        dumps(BackendConfig("b").set_backend_pattern_config(entry))


def test_extending_keeps_names_and_ports(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(SWISH, encoding="utf-8")
    head = (
        "schema_version: 1\nname: more\nextends: base.yaml\nentries:\n- pattern:\n    inputs: [v]\n"
    )
    nodes = (
        "    nodes:\n    - {name: s, op: torch.sigmoid, arguments: [v]}\n"
        "    - {name: m, op: torch.mul, arguments: [v, s], any_order: true}\n"
    )
    (tmp_path / "kept.yaml").write_text(
        head + nodes + "  observation_type: OUTPUT_SHARE_OBSERVER_WITH_INPUT\n", encoding="utf-8"
    )
    [kept] = BackendConfig.load(tmp_path / "kept.yaml").configs
    assert kept.pattern == swish().pattern
    assert kept.ports == swish().ports
    (tmp_path / "respelt.yaml").write_text(head + nodes + "  ports: {v: float}\n", encoding="utf-8")
    [respelt] = BackendConfig.load(tmp_path / "respelt.yaml").configs
    assert respelt.pattern.inputs == ("v",)
    assert respelt.ports == {"v": Port("float")}
    [base] = BackendConfig.load(tmp_path / "base.yaml").configs
    assert base == swish()


def test_remove_takes_a_graph(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(SWISH, encoding="utf-8")
    (tmp_path / "less.yaml").write_text(
        "schema_version: 1\nname: less\nextends: base.yaml\nremove:\n- inputs: [x]\n  nodes:\n"
        "  - {name: gate, op: torch.sigmoid, arguments: [x]}\n"
        "  - {name: out, op: torch.mul, arguments: [x, gate], any_order: true}\n",
        encoding="utf-8",
    )
    assert BackendConfig.load(tmp_path / "less.yaml").configs == []


def test_tables_and_differences_name_the_pattern() -> None:
    config = everything()
    text = "swish = torch.mul(a, torch.sigmoid(a); any order)"
    assert text in render(document_of(config), width=400)
    assert support_rows(config)[0].operators == (text,)
    other = everything()
    other.configs[0].set_ports({"x": "float"})
    changes = diff(config, other).to_dict()["entries"]
    [change] = changes
    assert change["pattern"] == text
    assert change["fields"] == [
        {
            "field": "ports",
            "before": "x: activation, out: shares with x",
            "after": "x: float",
        }
    ]


def test_other_names_are_a_difference() -> None:
    one, two = swish(), swish().set_ports({})
    nodes = {"s": (torch.sigmoid, "v"), "m": (AnyOrder(torch.mul), "v", "s")}
    one.set_ports({})
    two.set_pattern(GraphPattern(["v"], nodes))
    configs = [BackendConfig("b").set_backend_pattern_config(entry) for entry in (one, two)]
    [change] = diff(*configs).to_dict()["entries"]
    assert change["fields"][0]["field"] == "pattern"
    assert "GraphPattern(['v']" in change["fields"][0]["after"]
