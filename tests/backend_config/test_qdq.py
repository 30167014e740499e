"""``QDQRules`` in the description language: dicts, files, diff, equality, errors."""

from __future__ import annotations

import operator

import pytest
import torch

from backquant.backend_config import BackendConfig, QDQRules, files
from backquant.backend_config.tables import qdq_lines
from backquant.errors import SpecError

RULES = QDQRules(
    dequantize_per_user=True,
    quantize_constants=False,
    quantized_outputs="where_read",
    weights="quantized_float",
    bias="int32",
    float_outputs=(torch.nn.Linear,),
    only_between_quantized=(operator.add, "relu"),
    epilogues=(operator.add, torch.nn.ReLU),
)


@pytest.mark.parametrize(
    "rules", [QDQRules(), RULES, QDQRules(only_between_quantized=(torch.add,))]
)
def test_dict_round_trip(rules: QDQRules) -> None:
    config = BackendConfig("mine").set_qdq(rules)
    assert BackendConfig.from_dict(config.to_dict()) == config
    assert BackendConfig.from_dict(config.to_dict()).qdq == rules


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_file_round_trip(form: str) -> None:
    config = BackendConfig("mine").set_qdq(RULES)
    text = files.dumps(config, form)
    assert files.loads(text, form, file="mine") == config
    assert "only_between_quantized" in text


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
        ({"quantized_outputs": "never"}, "quantized_outputs cannot be 'never'"),
        ({"dequantize_per_user": None}, "dequantize_per_user cannot be None"),
        ({"quantize_constants": 1}, "quantize_constants must be a bool"),
        ({"only_between_quantized": torch.add}, "operators are named in a tuple"),
        ({"float_outputs": ((torch.add, torch.relu),)}, "single operators are named here"),
        ({"qdqq": 1}, "QDQRules has no field 'qdqq'"),
    ],
)
def test_wrong_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        QDQRules.from_dict(values)


def test_only_rules_are_rules() -> None:
    with pytest.raises(SpecError, match="qdq must be QDQRules"):
        BackendConfig("mine").set_qdq({"weights": "integer"})  # type: ignore[arg-type]


def test_lines_for_tables() -> None:
    config = BackendConfig("mine").set_qdq(RULES)
    assert "only_between_quantized: operator.add, .relu()" in qdq_lines(config)
