from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.ao.quantization.backend_config import BackendPatternConfig as Oracle

from backquant.backend_config import (
    BackendPatternConfig,
    DTypeConfig,
    MatchAllNode,
    ObservationType,
    SequentialFuser,
)
from backquant.errors import SpecError

SHARES = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
DIFFERENT = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
UNOBSERVED = ObservationType.INPUT_OUTPUT_NOT_OBSERVED

MODULES = st.sampled_from([None, nn.Linear, nn.Conv2d, nn.ReLU])
CALLABLES = st.sampled_from([None, len, max, SequentialFuser(nn.Sequential)])
OBSERVATIONS = st.sampled_from(list(ObservationType))
ENTRIES = st.fixed_dictionaries(
    {
        "observation_type": OBSERVATIONS,
        "dtype_configs": st.lists(
            st.builds(DTypeConfig, st.sampled_from([torch.quint8, torch.qint8])), max_size=3
        ),
        "root_module": MODULES,
        "qat_module": MODULES,
        "reference_quantized_module_for_root": MODULES,
        "fused_module": MODULES,
        "fuser_method": CALLABLES,
        "root_node_getter": CALLABLES,
        "extra_inputs_getter": CALLABLES,
        "num_tensor_args_to_observation_type": st.dictionaries(st.integers(0, 3), OBSERVATIONS),
        "input_type_to_index": st.dictionaries(
            st.sampled_from(["weight", "bias", "input"]), st.integers(0, 4)
        ),
        "input_output_observed": st.sampled_from([None, True, False]),
        "overwrite_output_fake_quantize": CALLABLES,
        "overwrite_output_observer": CALLABLES,
    }
)
PATTERNS = st.one_of(
    st.builds(lambda p: {"pattern": p}, st.sampled_from([torch.add, "view", (len, "view")])),
    st.builds(
        lambda p: {"pattern_complex_format": p},
        st.sampled_from([torch.add, (torch.add, MatchAllNode, nn.Linear)]),
    ),
)


@given(ENTRIES, PATTERNS)
def test_dict_round_trip(fields: dict[str, Any], pattern: dict[str, Any]) -> None:
    config = BackendPatternConfig.from_dict({**pattern, **fields})
    again = BackendPatternConfig.from_dict(config.to_dict())
    assert again == config
    assert again.to_dict() == config.to_dict()


def test_to_dict_has_the_keys_of_pytorch(full_entry: Callable[[], BackendPatternConfig]) -> None:
    ours = full_entry().to_dict()
    oracle = (
        Oracle((nn.Linear, nn.ReLU))
        .set_root_module(nn.Linear)
        .set_qat_module(nn.Bilinear)
        .set_reference_quantized_module(nn.Identity)
        .set_fused_module(nn.Sequential)
        .set_fuser_method(len)
        ._set_root_node_getter(max)
        ._set_extra_inputs_getter(min)
        ._set_num_tensor_args_to_observation_type({1: 1})  # type: ignore[dict-item]
        ._set_input_type_to_index({"weight": 1, "bias": 2})
        .to_dict()
    )
    assert list(ours) == list(oracle)
    same = set(oracle) - {
        "observation_type",
        "dtype_configs",
        "num_tensor_args_to_observation_type",
    }
    assert {key: ours[key] for key in same} == {key: oracle[key] for key in same}
    assert list(BackendPatternConfig(torch.add).to_dict()) == list(Oracle(torch.add).to_dict())


def test_attributes_are_those_of_pytorch() -> None:
    ours, oracle = BackendPatternConfig(torch.add), Oracle(torch.add)
    assert all(hasattr(ours, name) for name in vars(oracle))
    setters = [name for name in dir(oracle) if name.lstrip("_").startswith(("set_", "add_"))]
    assert setters
    assert all(callable(getattr(ours, name)) for name in setters)


def test_every_setter_returns_the_config(full_entry: Callable[[], BackendPatternConfig]) -> None:
    config = full_entry()
    assert config._set_overwrite_output_observer(len) is config
    assert config._set_overwrite_output_fake_quantize(len) is config
    assert config._set_input_output_observed(True) is config
    assert config.set_pattern("view") is config
    assert BackendPatternConfig()._set_pattern_complex_format("view").pattern is None


def test_keys_as_the_documents_write_them() -> None:
    given_dict = {"pattern": nn.Linear, "reference_quantized_module": nn.Identity}
    assert Oracle.from_dict(given_dict).reference_quantized_module is None
    assert BackendPatternConfig.from_dict(given_dict).reference_quantized_module is nn.Identity


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_only_one_pattern_format(order: tuple[int, int]) -> None:
    setters = ("set_pattern", "_set_pattern_complex_format")
    config = BackendPatternConfig()
    getattr(config, setters[order[0]])(nn.Linear)
    with pytest.raises(ValueError, match="only one of 'pattern' and 'pattern_complex_format'"):
        getattr(config, setters[order[1]])(nn.Linear)
    with pytest.raises(SpecError):
        BackendPatternConfig.from_dict({"pattern": "a", "pattern_complex_format": "b"})


def test_a_pattern_can_be_taken_back() -> None:
    config = BackendPatternConfig(nn.Linear).set_pattern(None)
    assert config._set_pattern_complex_format((nn.ReLU, nn.Linear)).pattern is None


def test_a_normal_pattern_is_taken_in_the_form_of_the_setter() -> None:
    sequence = BackendPatternConfig((nn.Linear, nn.ReLU))
    assert BackendPatternConfig(sequence.normal_pattern).pattern == (nn.Linear, nn.ReLU)
    nested = BackendPatternConfig()._set_pattern_complex_format(sequence.normal_pattern)
    assert nested._pattern_complex_format == (nn.ReLU, nn.Linear)


def test_without_a_pattern_there_is_no_normal_form() -> None:
    with pytest.raises(SpecError) as caught:
        _ = BackendPatternConfig().normal_pattern
    assert str(caught.value) == (
        "a BackendPatternConfig without a pattern\n  where  pattern\n"
        "  fix    BackendPatternConfig(torch.nn.Linear)"
    )


def test_two_spellings_are_equal_unless_a_fuser_tells_them_apart() -> None:
    forward = BackendPatternConfig((nn.Linear, nn.ReLU))
    nested = BackendPatternConfig()._set_pattern_complex_format((nn.ReLU, nn.Linear))
    assert forward == nested
    forward.set_fuser_method(len)
    nested.set_fuser_method(len)
    assert forward != nested


def test_every_field_counts_for_equality(full_entry: Callable[[], BackendPatternConfig]) -> None:
    changes: list[Callable[[BackendPatternConfig], Any]] = [
        lambda c: c.set_pattern((nn.Linear, nn.GELU)),
        lambda c: c.set_observation_type(DIFFERENT),
        lambda c: c.add_dtype_config(DTypeConfig()),
        lambda c: c.set_root_module(None),
        lambda c: c.set_qat_module(None),
        lambda c: c.set_reference_quantized_module(None),
        lambda c: c.set_fused_module(None),
        lambda c: c.set_fuser_method(None),
        lambda c: c._set_root_node_getter(None),
        lambda c: c._set_extra_inputs_getter(None),
        lambda c: c._set_num_tensor_args_to_observation_type({}),
        lambda c: c._set_input_type_to_index({}),
        lambda c: c._set_input_output_observed(False),
        lambda c: c._set_overwrite_output_fake_quantize(len),
        lambda c: c._set_overwrite_output_observer(len),
    ]
    assert full_entry() == full_entry() == copy.deepcopy(full_entry())
    for change in changes:
        changed = full_entry()
        change(changed)
        assert changed != full_entry()
    assert full_entry() != "an entry"
    with pytest.raises(TypeError):
        hash(full_entry())


def test_input_output_observed_acts_whatever_the_order_of_setters() -> None:
    first = BackendPatternConfig("size")._set_input_output_observed(False)
    first.set_observation_type(SHARES)
    last = BackendPatternConfig("size").set_observation_type(SHARES)
    last._set_input_output_observed(False)
    assert first.observation_type is last.observation_type is UNOBSERVED
    assert first._set_input_output_observed(True).observation_type is SHARES


def test_lists_and_dicts_are_copied() -> None:
    configs, mapping, index = [DTypeConfig()], {1: SHARES}, {"weight": 1}
    config = (
        BackendPatternConfig("view")
        .set_dtype_configs(configs)
        ._set_num_tensor_args_to_observation_type(mapping)
        ._set_input_type_to_index(index)
    )
    values = config.to_dict()
    configs.clear()
    mapping.clear()
    index.clear()
    values["input_type_to_index"].clear()
    assert len(config.dtype_configs) == 1
    assert config._num_tensor_args_to_observation_type == {1: SHARES}
    assert config._input_type_to_index == {"weight": 1}


@pytest.mark.parametrize(
    ("given_dict", "where"),
    [
        ({"patern": nn.Linear}, "patern"),
        ({"pattern": nn.ReLU()}, "pattern"),
        ({"observation_type": 1}, "observation_type"),
        ({"dtype_configs": [{}, 3]}, "dtype_configs[1]"),
        ({"dtype_configs": [{"input_dtyp": 3}]}, "dtype_configs[0].input_dtyp"),
        ({"root_module": nn.Linear(1, 1)}, "root_module"),
        ({"qat_module": int}, "qat_module"),
        ({"reference_quantized_module": 3}, "reference_quantized_module"),
        ({"fused_module": "torch.nn.ReLU"}, "fused_module"),
        ({"fuser_method": "fuse"}, "fuser_method"),
        ({"root_node_getter": 1}, "root_node_getter"),
        ({"extra_inputs_getter": 1}, "extra_inputs_getter"),
        (
            {"num_tensor_args_to_observation_type": {-1: SHARES}},
            "num_tensor_args_to_observation_type[-1]",
        ),
        (
            {"num_tensor_args_to_observation_type": {1: 0}},
            "num_tensor_args_to_observation_type[1]",
        ),
        ({"input_type_to_index": {"wieght": 1}}, "input_type_to_index"),
        ({"input_type_to_index": {"weight": "1"}}, "input_type_to_index['weight']"),
        ({"input_output_observed": 0}, "input_output_observed"),
        ({"overwrite_output_fake_quantize": 1}, "overwrite_output_fake_quantize"),
        ({"overwrite_output_observer": 1}, "overwrite_output_observer"),
    ],
)
def test_from_dict_refuses_with_the_place(given_dict: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        BackendPatternConfig.from_dict(given_dict)
    assert caught.value.where == where
    assert isinstance(caught.value, ValueError)


def test_unknown_key_is_not_dropped_in_silence() -> None:
    with pytest.raises(SpecError) as caught:
        BackendPatternConfig.from_dict({"pattern": nn.Linear, "root_modul": nn.Linear})
    assert str(caught.value) == (
        "BackendPatternConfig has no field 'root_modul'\n  where  root_modul\n"
        "  fix    did you mean 'root_module'?"
    )


def test_repr(full_entry: Callable[[], BackendPatternConfig]) -> None:
    assert repr(full_entry()) == (
        "BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU), "
        "observation_type=ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT, "
        "dtype_configs=[DTypeConfig(input_dtype=torch.quint8, output_dtype=torch.quint8, "
        "weight_dtype=torch.qint8, bias_dtype=torch.float32, is_dynamic=True)], "
        "root_module=torch.nn.Linear, qat_module=torch.nn.Bilinear, "
        "reference_quantized_module_for_root=torch.nn.Identity, fused_module=torch.nn.Sequential, "
        "fuser_method=len, root_node_getter=max, extra_inputs_getter=min, "
        "num_tensor_args_to_observation_type="
        "{1: ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT}, "
        "input_type_to_index={'weight': 1, 'bias': 2})"
    )
    assert repr(BackendPatternConfig()) == "BackendPatternConfig()"
    nested = BackendPatternConfig()._set_pattern_complex_format((torch.add, MatchAllNode, "view"))
    assert repr(nested) == (
        "BackendPatternConfig(pattern_complex_format="
        "(torch.add, backquant.backend_config.MatchAllNode, 'view'))"
    )
