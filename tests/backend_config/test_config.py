from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DTypeConfig,
    QuantDefault,
)
from backquant.errors import SpecError

DEFAULTS = BackendDefaults(QuantDefault("histogram"), QuantDefault("minmax"))
OPERATORS = st.sampled_from([nn.Linear, nn.ReLU, torch.add, "view"])
PATTERNS = st.one_of(OPERATORS, st.lists(OPERATORS, min_size=2, max_size=3).map(tuple))


def _reversed(pattern: Any) -> Any:
    if not isinstance(pattern, tuple):
        return pattern
    nested = pattern[0]
    for operator in pattern[1:]:
        nested = (operator, nested)
    return nested


@given(st.lists(st.tuples(PATTERNS, st.booleans()), max_size=12))
def test_one_key_per_pattern_later_overrides_and_keeps_the_place(
    spelled: list[tuple[Any, bool]],
) -> None:
    """A dict keyed by the reversed form is the model."""
    backend, model = BackendConfig(), {}
    for pattern, is_reversed in spelled:
        config = BackendPatternConfig()
        if is_reversed:
            config._set_pattern_complex_format(_reversed(pattern))
        else:
            config.set_pattern(pattern)
        backend.set_backend_pattern_config(config)
        model[_reversed(pattern)] = config
    ours = backend._pattern_complex_format_to_config
    assert list(ours) == list(model)
    assert all(ours[key] is model[key] for key in model)
    assert all(a is b for a, b in zip(backend.configs, model.values(), strict=True))
    assert BackendConfig.from_dict(backend.to_dict()) == backend


def test_a_dict_of_pytorch_gives_equal_keys_and_survives(
    oracle: Any, to_ours: Callable[[Any], BackendConfig], translated: Callable[[Any], Any]
) -> None:
    ours = to_ours(oracle)
    assert ours.name == oracle.name
    keys = [translated(key) for key in oracle._pattern_complex_format_to_config]
    assert list(ours._pattern_complex_format_to_config) == keys
    assert ours.to_dict() == translated(oracle.to_dict())
    assert BackendConfig.from_dict(ours.to_dict()) == ours


def test_configs_and_entries_are_copies() -> None:
    backend = BackendConfig().set_backend_pattern_config(BackendPatternConfig(torch.add))
    backend.configs.clear()
    backend.entries.clear()
    backend._pattern_complex_format_to_config.clear()
    assert len(backend.configs) == len(backend.entries) == 1


def test_the_key_is_the_pattern_at_registration() -> None:
    entry = BackendPatternConfig(torch.add)
    backend = BackendConfig().set_backend_pattern_config(entry)
    entry.set_pattern(torch.mul)
    assert list(backend._pattern_complex_format_to_config) == [torch.add]


def test_every_field_counts_for_equality() -> None:
    def build() -> BackendConfig:
        entries = [BackendPatternConfig(torch.add), BackendPatternConfig(torch.mul)]
        backend = BackendConfig("a").set_engine("x86").set_defaults(DEFAULTS)
        return backend.set_backend_pattern_configs(entries)

    assert build() == build() == copy.deepcopy(build())
    assert build() != build().set_name("b")
    assert build() != build().set_engine(None)
    assert build() != build().set_defaults(None)
    assert build() != build().set_backend_pattern_config(BackendPatternConfig("view"))
    reordered = BackendConfig("a").set_engine("x86").set_defaults(DEFAULTS)
    assert build() != reordered.set_backend_pattern_configs(build().configs[::-1])
    assert build() != "a"
    assert pickle.loads(pickle.dumps(build())) == build()
    with pytest.raises(TypeError):
        hash(build())


def test_extension_fields_are_absent_from_the_dict_until_set() -> None:
    assert BackendConfig("a").to_dict() == {"name": "a", "configs": []}
    backend = BackendConfig("a").set_engine("x86").set_defaults(DEFAULTS)
    assert backend.to_dict() == {
        "name": "a",
        "configs": [],
        "engine": "x86",
        "defaults": {
            "activation": {"observer": "histogram"},
            "weight": {"observer": "minmax"},
        },
    }
    assert BackendConfig.from_dict(backend.to_dict()) == backend
    assert BackendConfig.from_dict({"defaults": DEFAULTS}).defaults is DEFAULTS


@pytest.mark.parametrize(
    ("given_dict", "where"),
    [
        ({"nam": "x"}, "nam"),
        ({"name": 3}, "name"),
        ({"engine": 3}, "engine"),
        ({"defaults": 3}, "defaults"),
        ({"defaults": {"activation": {"observer": "histgram"}}}, "defaults.activation.observer"),
        ({"defaults": {"activation": {"observer": "minmax"}}}, "defaults.weight"),
        ({"configs": [3]}, "configs[0]"),
        ({"configs": [{"pattern": "add"}, {}]}, "configs[1].pattern"),
        (
            {"configs": [{"dtype_configs": [{"weight_dtype": {"ch_axs": 0}}]}]},
            "configs[0].dtype_configs[0].weight_dtype.ch_axs",
        ),
    ],
)
def test_from_dict_refuses_with_the_place(given_dict: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        BackendConfig.from_dict(given_dict)
    assert caught.value.where == where


def test_registration_refuses_other_objects_with_the_place() -> None:
    with pytest.raises(SpecError) as caught:
        BackendConfig().set_backend_pattern_configs([BackendPatternConfig("a"), {}])  # type: ignore[list-item]
    assert caught.value.where == "configs[1].configs"
    with pytest.raises(SpecError, match="without a pattern"):
        BackendConfig().set_backend_pattern_config(BackendPatternConfig())


def test_repr() -> None:
    int8 = DTypeConfig(torch.quint8)
    entry = BackendPatternConfig(torch.add).add_dtype_config(int8)
    backend = BackendConfig("mine").set_engine("x86").set_backend_pattern_config(entry)
    assert repr(backend) == (
        "BackendConfig('mine', engine='x86', configs=[\n"
        "    BackendPatternConfig(torch.add, dtype_configs=[DTypeConfig(input_dtype=torch.quint8)]),\n"
        "])"
    )
    assert repr(BackendConfig("a").set_defaults(DEFAULTS)) == (
        "BackendConfig('a', defaults=BackendDefaults(activation=QuantDefault('histogram'), "
        "weight=QuantDefault('minmax')), configs=[])"
    )


def test_importing_the_room_imports_neither_pydantic_nor_torch_ao_quantization() -> None:
    """Measured against what torch alone imports."""
    code = (
        "import sys, torch; before = set(sys.modules); import backquant.backend_config; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "heavy = new & {'pydantic', 'yaml', 'rich', 'jinja2', 'typer', 'sklearn', 'safetensors'}; "
        "assert not heavy, heavy; "
        "assert not [m for m in set(sys.modules) - before if m.startswith('torch.ao')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
