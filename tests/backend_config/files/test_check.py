"""The message, line and fix for every kind of structural mistake."""

from __future__ import annotations

import pytest

from backquant.backend_config.files.check import structure_problems
from backquant.backend_config.files.located import read_yaml


def problems(text: str) -> list[str]:
    return [str(problem) for problem in structure_problems(read_yaml(text, "x.yaml"))]


HEAD = "schema_version: 1\nname: x\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "x.yaml:1: a spec file holds a mapping; schema_version: 1"),
        ("name: x", "x.yaml:1: schema_version: this field is missing"),
        (
            "schema_version: 2\nname: x",
            "x.yaml:1: schema_version: this version of backquant reads schema_version 1, not 2; "
            "upgrade backquant",
        ),
        (
            "schema_version: true\nname: x",
            "x.yaml:1: schema_version: this version of backquant reads schema_version 1, not 'True'; "
            "schema_version: 1",
        ),
        (
            "schema_version: '1'\nname: x",
            "x.yaml:1: schema_version: this version of backquant reads schema_version 1, not '1'; "
            "schema_version: 1",
        ),
        (HEAD + "nme: y", 'x.yaml:3: nme: unknown field; did you mean "name"?'),
        (HEAD + "engine: 3", "x.yaml:3: engine: should be a valid string, got 3"),
        (
            HEAD + "entries:\n- pattern: torch.add\n  dtype_config: [a]",
            'x.yaml:5: entries[0].dtype_config: unknown field; did you mean "dtype_configs"?',
        ),
        (
            HEAD + "entries:\n- pattern: add",
            "x.yaml:4: entries[0].pattern: 'add' is no operator: write an import path (torch.add) "
            "or a method with a dot (.view)",
        ),
        (
            HEAD + "entries:\n- pattern: 3",
            "x.yaml:4: entries[0].pattern: expected an operator, a list of operators in forward "
            "order, {reversed: […]}, {inputs: […], nodes: […]} or {nodes: […]}, got 3",
        ),
        (
            HEAD + "entries:\n- pattern: {reversd: [torch.add]}",
            'x.yaml:4: entries[0].pattern.reversd: unknown field; did you mean "reversed"?',
        ),
        (
            HEAD + "entries:\n- pattern: torch.add\n  observation_type: OUTPUT_SHARE",
            "x.yaml:5: entries[0].observation_type: 'OUTPUT_SHARE' is not one of the values allowed "
            'here; did you mean "OUTPUT_SHARE_OBSERVER_WITH_INPUT"?',
        ),
        (
            HEAD + "entries:\n- pattern: torch.add\n  input_type_to_index: {wieght: 1}",
            "x.yaml:5: entries[0].input_type_to_index.wieght: 'wieght' is not one of the values "
            'allowed here; did you mean "weight"?',
        ),
        (
            HEAD + "entries:\n- pattern: torch.add\n  num_tensor_args_to_observation_type:\n"
            "    two: OUTPUT_SHARE_OBSERVER_WITH_INPUT",
            "x.yaml:6: entries[0].num_tensor_args_to_observation_type.two: 'two' is no number of "
            "tensor arguments",
        ),
        (
            HEAD + "entries:\n- pattern: torch.add\n  fuser_method: {sequental: a.b}",
            'x.yaml:5: entries[0].fuser_method.sequental: unknown field; did you mean "sequential"?',
        ),
        (
            HEAD + "entries:\n- pattern: torch.add\n  root_module: Linear",
            "x.yaml:5: entries[0].root_module: 'Linear' is no import path: write package.module.name",
        ),
        (
            HEAD + "dtype_configs:\n  a:\n    input_dtype: {dtype: quint8, simmetric: true}",
            "x.yaml:5: dtype_configs.a.input_dtype.simmetric: unknown field; did you mean "
            '"symmetric"?',
        ),
        (
            HEAD + "dtype_configs:\n  a:\n    input_dtype: {scale_min_lower_bound: tiny}",
            "x.yaml:5: dtype_configs.a.input_dtype.scale_min_lower_bound: 'tiny' is no number: "
            "write 0.5 or 2**-12",
        ),
        (
            HEAD + "dtype_configs:\n  a:\n    input_dtype: {quant_min_lower_bound: .inf}",
            "x.yaml:5: dtype_configs.a.input_dtype.quant_min_lower_bound: should be a finite "
            "number, got inf",
        ),
        (
            HEAD + "dtype_configs:\n  a:\n    input_dtype: [quint8]",
            "x.yaml:5: dtype_configs.a.input_dtype: expected a dtype name, or a mapping with the "
            "key dtype, got ['quint8']",
        ),
        (
            HEAD + "dtype_configs:\n  a:\n    bias_type: float",
            'x.yaml:5: dtype_configs.a.bias_type: unknown field; did you mean "bias_dtype"?',
        ),
        (
            HEAD
            + "defaults:\n  activation: {observer: minmax, dtyp: quint8}\n  weight: {observer: x}",
            'x.yaml:4: defaults.activation.dtyp: unknown field; did you mean "dtype"?',
        ),
    ],
)
def test_message(text, expected):
    assert problems(text)[0] == expected


def test_all_problems_in_file_order():
    text = HEAD + "entries:\n- pattern: add\n  dtype_config: x\n- patern: y\nengin: z\n"
    lines = [problem.split(":")[1] for problem in problems(text)]
    assert lines == ["4", "5", "6", "7"]


def test_a_sound_file_has_none():
    assert problems(HEAD) == []
    assert problems(HEAD + "entries:\n- pattern: torch.add\n  observation_type: null\n") == []
