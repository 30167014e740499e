"""What a file means: names, overrides field by field, removals, and every mistake at its place."""

from __future__ import annotations

import pytest
import torch

import backquant as bq
from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
    SequentialFuser,
    files,
    normal_form,
)
from backquant.backend_config.files import SpecFileError
from backquant.backend_config.files.located import read_yaml
from backquant.backend_config.files.read import Base, build
from backquant.backend_config.import_paths import Resolver
from backquant.errors import SpecError
from backquant.operators import spellings

STATIC = DTypeConfig(torch.quint8, torch.quint8)
SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
OWN = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT


def parent() -> BackendConfig:
    fused = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU)).set_fused_module(
        torch.nn.Sequential
    )
    return (
        BackendConfig("parent")
        .set_engine("x86")
        .set_backend_pattern_configs(
            [
                BackendPatternConfig(torch.add)
                .add_dtype_config(STATIC)
                .set_observation_type(SHARE)
                ._set_input_type_to_index({"weight": 1}),
                fused.set_fuser_method(SequentialFuser(torch.nn.Sequential)),
                BackendPatternConfig("view").add_dtype_config(STATIC),
            ]
        )
    )


def load(
    body: str, base: BackendConfig | None = None, allow: tuple[str, ...] = ()
) -> BackendConfig:
    text = "schema_version: 1\nname: child\n" + body
    known = Base(base) if base is not None else None
    return build(read_yaml(text, "x.yaml"), Resolver(allow), known).config


def problems(body: str, base: BackendConfig | None = None) -> list[str]:
    with pytest.raises(SpecFileError) as caught:
        load(body, base)
    return [str(problem) for problem in caught.value.problems]


def test_entries_and_named_dtype_configs():
    config = load(
        "dtype_configs:\n"
        "  a: {input_dtype: {dtype: qint8, scale_min_lower_bound: 2**-12}, is_dynamic: true}\n"
        "entries:\n"
        "- patterns: [torch.add, [torch.nn.Linear, .relu]]\n"
        "  dtype_configs: [a, {bias_dtype: float}]\n"
    )
    expected = [
        DTypeConfig(
            DTypeWithConstraints(torch.qint8, scale_min_lower_bound=2**-12), is_dynamic=True
        ),
        DTypeConfig(bias_dtype=torch.float32),
    ]
    assert list(config.entries) == [normal_form(torch.add), normal_form((torch.nn.Linear, "relu"))]
    assert [entry.dtype_configs for entry in config.configs] == [expected, expected]


def test_entries_do_not_share_their_dtype_configs():
    config = load(
        "dtype_configs: {a: {input_dtype: quint8}}\n"
        "entries: [{patterns: [torch.add, torch.mul], dtype_configs: [a]}]\n"
    )
    first, second = config.configs
    first.dtype_configs[0].is_dynamic = True
    assert second.dtype_configs[0].is_dynamic is None


def test_inherited_fields_stay_and_the_place_too():
    config = load("entries:\n- pattern: torch.add\n  root_module: torch.nn.Linear\n", parent())
    entry = config.configs[0]
    assert entry.root_module is torch.nn.Linear
    assert (entry.observation_type, entry.dtype_configs) == (SHARE, [STATIC])
    assert list(config.entries) == list(parent().entries)
    assert (config.name, config.engine) == ("child", "x86")


def test_null_resets_a_field():
    config = load(
        "engine: null\nentries:\n- pattern: torch.add\n  observation_type: null\n"
        "  dtype_configs: null\n  input_type_to_index: null\n",
        parent(),
    )
    entry = config.configs[0]
    assert (entry.observation_type, entry.dtype_configs) == (OWN, [])
    assert entry._input_type_to_index == {}
    assert config.engine is None


def test_add_dtype_configs_appends():
    config = load(
        "entries:\n- pattern: torch.add\n  add_dtype_configs: [{input_dtype: qint8}]\n", parent()
    )
    assert config.configs[0].dtype_configs == [STATIC, DTypeConfig(torch.qint8)]


def test_extending_does_not_change_the_parent():
    original = parent()
    config = load(
        "entries:\n- pattern: torch.add\n  dtype_configs: []\n  input_type_to_index: {bias: 3}\n",
        original,
    )
    config.configs[2].dtype_configs.append(STATIC)
    assert original == parent()


def test_remove_and_append():
    config = load(
        "remove: [torch.add, [torch.nn.Linear, torch.nn.ReLU]]\nentries:\n- pattern: torch.add\n",
        parent(),
    )
    assert [str(pattern) for pattern in config.entries] == [".view()", "torch.add"]
    assert config.configs[1] == BackendPatternConfig(torch.add)


def test_an_inherited_fuser_keeps_the_spelling_of_its_pattern():
    body = (
        "entries:\n- pattern: {reversed: [torch.nn.ReLU, torch.nn.Linear]}\n"
        "  qat_module: torch.nn.Linear\n"
    )
    entry = load(body, parent()).configs[1]
    assert entry.pattern == (torch.nn.Linear, torch.nn.ReLU)
    entry = load(
        body + "  fuser_method: backquant.backend_config.get_backend_config\n", parent()
    ).configs[1]
    assert entry.pattern is None
    assert entry._pattern_complex_format == (torch.nn.ReLU, torch.nn.Linear)


def test_defaults_are_inherited_replaced_and_reset():
    text = "defaults: {activation: {observer: minmax, eps: 2**-12}, weight: {observer: minmax}}\n"
    config = load(text)
    assert config.defaults is not None
    assert config.defaults.activation.eps == 2**-12
    assert load("", config).defaults == config.defaults
    assert load("defaults: null\n", config).defaults is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "entries:\n- dtype_configs: []\n",
            "x.yaml:4: entries[0]: an entry has no pattern; write one of pattern, patterns, operators",
        ),
        (
            "entries:\n- {pattern: torch.add, patterns: [torch.mul]}\n",
            "x.yaml:4: entries[0]: an entry has both pattern and patterns; write one of pattern, "
            "patterns",
        ),
        (
            "entries:\n- pattern: torch.add\n- pattern: {reversed: torch.add}\n",
            "x.yaml:5: entries[1].pattern: the pattern torch.add stands twice (first on line 4); "
            "merge the two entries",
        ),
        (
            "dtype_configs: {static: {}}\nentries:\n- pattern: torch.add\n  dtype_configs: [statik]\n",
            'x.yaml:6: entries[0].dtype_configs[0]: no dtype config is called "statik" in this file; '
            'did you mean "static"?',
        ),
        (
            "dtype_configs:\n  a:\n    weight_dtype: {dtype: qint9}\n",
            'x.yaml:5: dtype_configs.a.weight_dtype.dtype: unknown dtype "qint9"; did you mean '
            '"qint8"?',
        ),
        (
            "entries:\n- patterns:\n  - torch.add\n  - torch.addd\n",
            'x.yaml:6: entries[0].patterns[1]: "torch.addd": torch has no "addd"; did you mean '
            '"torch.add"?',
        ),
        (
            "entries:\n- pattern: torch.add\n  root_module: torch.add\n",
            "x.yaml:5: entries[0].root_module: root_module must be a subclass of torch.nn.Module, "
            "got <built-in method add",
        ),
        (
            "remove: [torch.add]\n",
            "x.yaml:3: remove[0]: a file without extends has nothing to remove; extends: <name>",
        ),
        (
            "defaults: {activation: {observer: minmx}, weight: {observer: minmax}}\n",
            "x.yaml:3: defaults",
        ),
    ],
)
def test_problems_at_their_place(body, expected):
    [problem] = problems(body)
    assert problem.startswith(expected)


def test_removing_what_is_not_there():
    [problem] = problems("remove:\n- torch.add\n- torch.adds\n- torch.sub\n", parent())[1:]
    assert problem == "x.yaml:6: remove[2]: the extended backend has no entry torch.sub"


def test_every_problem_is_reported_once_and_in_order():
    found = problems(
        "dtype_configs: {a: {input_dtype: quint9}}\n"
        "entries:\n- pattern: torch.addd\n- pattern: torch.add\n  dtype_configs: [a]\n"
        "  fuser_method: os.system\n"
    )
    assert [line.split(":")[1] for line in found] == ["3", "5", "8"]


def test_places_of_entries():
    text = "schema_version: 1\nname: x\nentries:\n- pattern: torch.add\n- pattern: torch.mul\n"
    loaded = build(read_yaml(text, "x.yaml"), Resolver())
    assert {
        entry: written.tree.line_of(written.pattern) for entry, written in loaded.places.items()
    } == {
        normal_form(torch.add): 4,
        normal_form(torch.mul): 5,
    }


NAMED = """
schema_version: 1
name: named
dtype_configs:
  int8: {input_dtype: quint8, output_dtype: quint8}
entries:
- operators: [relu, softmax]
  dtype_configs: [int8]
- pattern: torch.add
  dtype_configs: [int8]
qdq:
  leave_float:
  - operators: [softmax, torch.add]
    before: [matmul]
"""


def test_operators_are_named_in_place_of_spellings() -> None:
    config = files.loads(NAMED, "yaml")
    found = [entry.pattern for entry in config.configs]
    assert found[:-1] == [*spellings("relu"), *spellings("softmax")]
    fixed = config.configs[len(spellings("relu"))].dtype_configs[0]
    assert fixed.output_dtype_with_constraints.scale_exact_match == 2**-8
    [rule] = config.qdq.leave_float
    assert rule.operators == (*spellings("softmax"), torch.add)
    assert rule.before == spellings("matmul")
    assert files.loads(files.dumps(config, "yaml"), "yaml") == config


def test_named_operators_override_what_is_inherited() -> None:
    text = "schema_version: 1\nname: mine\nextends: x86\nentries:\n"
    text += "- {operators: [hardswish], dtype_configs: [{input_dtype: qint8}], input_output_observed: false}"
    inherited = {e.normal_pattern for e in bq.get_backend_config("x86").configs}
    config = files.loads(text, "yaml")
    for pattern in spellings("hardswish"):
        [entry] = [e for e in config.configs if e.pattern == pattern]
        assert entry.normal_pattern in inherited
        assert [c.input_dtype for c in entry.dtype_configs] == [torch.qint8]
        assert entry._input_output_observed is False


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[relu, ", "[rellu, ", "no operator is called 'rellu'; did you mean 'relu'?"),
        (
            "pattern: torch.add",
            "pattern: torch.add\n  operators: [gelu]",
            "both pattern and operators",
        ),
        ("before: [matmul]", "before: [matmull]", "no operator is called 'matmull'"),
    ],
)
def test_misnamed_operators_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        files.loads(NAMED.replace(old, new), "yaml")
    assert message.split(";", maxsplit=1)[0] in str(caught.value)
