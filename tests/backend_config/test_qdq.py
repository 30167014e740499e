"""``QDQRules`` in the description language: dicts, files, diff, equality, errors."""

from __future__ import annotations

import operator

import pytest
import torch

from backquant.backend_config import BackendConfig, LeaveFloat, QDQRules, files
from backquant.backend_config.derived import qdq_lines
from backquant.errors import SpecError

RULES = QDQRules(
    dequantize_per_user=True,
    quantize_constants=False,
    weights="quantized_float",
    bias="int32",
    leave_float=(
        LeaveFloat((torch.nn.Linear,), results=True),
        LeaveFloat(
            (operator.add, "relu"), before=(torch.nn.LayerNorm,), unless_between_quantized=True
        ),
    ),
    epilogues=(operator.add, torch.nn.ReLU),
    additions="sum",
    attention="products",
)


@pytest.mark.parametrize("rules", [QDQRules(), RULES, QDQRules(epilogues=(torch.add,))])
def test_dict_round_trip(rules: QDQRules) -> None:
    config = BackendConfig("mine").set_qdq(rules)
    assert BackendConfig.from_dict(config.to_dict()) == config
    assert BackendConfig.from_dict(config.to_dict()).qdq == rules


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_file_round_trip(form: str) -> None:
    config = BackendConfig("mine").set_qdq(RULES)
    text = files.dumps(config, form)
    assert files.loads(text, form, file="mine") == config
    assert "unless_between_quantized" in text


def test_unset_differs_from_the_defaults_and_says_nothing_in_a_file() -> None:
    plain = BackendConfig("mine")
    assert plain != BackendConfig("mine").set_qdq(QDQRules())
    assert "qdq" not in plain.to_dict()
    assert "qdq" not in files.dumps(plain)
    assert plain.diff(BackendConfig("mine").set_qdq(QDQRules()))


def test_extended_files_inherit_and_replace() -> None:
    text = "schema_version: 1\nname: mine\nextends: onnxruntime\n"
    base = files.loads("schema_version: 1\nname: base\nextends: openvino\n", "yaml", file="base")
    assert base.qdq is not None
    assert base.qdq.quantize_constants is False
    own = files.loads(f"{text}qdq: {{dequantize_per_user: true}}\n", "yaml", file="mine")
    assert own.qdq == QDQRules(dequantize_per_user=True)
    none = files.loads(f"{text}qdq: null\n", "yaml", file="mine")
    assert none.qdq is None


def test_diff_names_the_fields() -> None:
    changed = BackendConfig("mine").set_qdq(QDQRules(weights="quantized_float"))
    text = changed.diff(BackendConfig("mine")).render()
    assert "qdq.weights" in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights": "int8"}, "weights cannot be 'int8'"),
        ({"leave_float": [{"operators": [torch.add]}]}, "nothing of the places"),
        ({"leave_float": torch.add}, "leave_float stand in a tuple"),
        ({"leave_float": (torch.add,)}, "expected a LeaveFloat"),
        ({"dequantize_per_user": None}, "dequantize_per_user cannot be None"),
        ({"quantize_constants": 1}, "quantize_constants must be a bool"),
        ({"epilogues": torch.add}, "epilogues is a tuple of operators"),
        ({"epilogues": ((torch.add, torch.relu),)}, "single operators are named here"),
        ({"qdqq": 1}, "QDQRules has no field 'qdqq'"),
    ],
)
def test_wrong_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        QDQRules.from_dict(values)


def test_rules_or_their_dict() -> None:
    given = BackendConfig("mine").set_qdq({"weights": "quantized_float"})  # type: ignore[arg-type]
    assert given.qdq == QDQRules(weights="quantized_float")
    with pytest.raises(SpecError, match="qdq must be a QDQRules or its dict"):
        BackendConfig("mine").set_qdq("integer")  # type: ignore[arg-type]


def test_lines_for_tables() -> None:
    config = BackendConfig("mine").set_qdq(RULES)
    assert qdq_lines(config)[-2:] == [
        "leave_float: nn.Linear – float results that only float operators read",
        "leave_float: operator.add, .relu() – float before nn.LayerNorm, unless between quantized operators",
    ]
