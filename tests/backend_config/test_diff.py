from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DefaultOverride,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
    QuantDefault,
    SequentialFuser,
    get_backend_config,
    list_backends,
)
from backquant.backend_config.derived import default_lines
from backquant.backend_config.diff import diff
from backquant.backend_config.leave_float import LeaveFloat

STATIC = DTypeConfig(torch.quint8, torch.quint8)
BOUNDED = DTypeConfig(DTypeWithConstraints(torch.quint8, quant_max_upper_bound=127), torch.quint8)
OTHER = DTypeConfig(torch.qint8, torch.qint8)
MINMAX = QuantDefault("minmax", dtype=torch.quint8)
HISTOGRAM = QuantDefault("histogram", dtype=torch.quint8)


def backend(*entries: BackendPatternConfig) -> BackendConfig:
    return BackendConfig("mine").set_backend_pattern_configs(entries)


def add(*configs: DTypeConfig) -> BackendPatternConfig:
    return BackendPatternConfig(torch.add).set_dtype_configs(configs)


def changes(first: BackendConfig, second: BackendConfig) -> list[str]:
    result = diff(first, second)
    return [str(c) for c in result.fields] + [str(c) for e in result.entries for c in e.fields]


@pytest.mark.parametrize("name", list_backends())
def test_equal_backends(name):
    result = diff(get_backend_config(name), get_backend_config(name))
    assert not result
    assert result.render() == f"{result.first} and {result.second} are equal"


def test_name_and_engine():
    first, second = BackendConfig("a"), BackendConfig("b").set_engine("x86")
    assert changes(first, second) == ["~ name: a ⇒ b", "+ engine: x86"]
    assert changes(second, first) == ["~ name: b ⇒ a", "- engine: x86"]


def test_constraints_field_by_field():
    assert changes(backend(add(STATIC)), backend(add(BOUNDED))) == [
        "+ dtype_configs[quint8 → quint8].input_dtype.quant_max_upper_bound: 127"
    ]


def test_dtype_configs_added_removed_and_reordered():
    assert changes(backend(add(STATIC)), backend(add(STATIC, OTHER))) == [
        "+ dtype_configs: qint8 → qint8"
    ]
    assert changes(backend(add(STATIC, OTHER)), backend(add(OTHER))) == [
        "- dtype_configs: quint8 → quint8"
    ]
    assert changes(backend(add(STATIC, OTHER)), backend(add(OTHER, STATIC))) == [
        "~ dtype_configs order: quint8 → quint8; qint8 → qint8 ⇒ qint8 → qint8; quint8 → quint8"
    ]
    assert changes(backend(add(STATIC)), backend(add(STATIC, STATIC))) == [
        "+ dtype_configs: quint8 → quint8"
    ]


def test_bias_scale():
    scaled = copy.deepcopy(STATIC)
    scaled.bias_scale = "input_times_weight"
    assert changes(backend(add(STATIC)), backend(add(scaled))) == [
        "+ dtype_configs[quint8 → quint8].bias_scale: input × weight"
    ]


def every_field() -> dict[str, BackendPatternConfig]:
    share = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    return {
        "observation_type": add().set_observation_type(share),
        "root_module": add().set_root_module(torch.nn.Linear),
        "qat_module": add().set_qat_module(torch.nn.Linear),
        "reference_quantized_module": add().set_reference_quantized_module(torch.nn.Linear),
        "fused_module": add().set_fused_module(torch.nn.Linear),
        "fuser_method": add().set_fuser_method(SequentialFuser(torch.nn.Sequential)),
        "root_node_getter": add()._set_root_node_getter(len),
        "extra_inputs_getter": add()._set_extra_inputs_getter(len),
        "num_tensor_args_to_observation_type": add()._set_num_tensor_args_to_observation_type(
            {1: share}
        ),
        "input_type_to_index": add()._set_input_type_to_index({"weight": 1}),
        "input_output_observed": add()._set_input_output_observed(True),
        "overwrite_output_fake_quantize": add()._set_overwrite_output_fake_quantize(len),
        "overwrite_output_observer": add()._set_overwrite_output_observer(len),
    }


@pytest.mark.parametrize("field", every_field())
def test_every_field_of_an_entry(field):
    [change] = diff(backend(add()), backend(every_field()[field])).entries[0].fields
    assert change.field == field
    assert change.after
    [back] = diff(backend(every_field()[field]), backend(add())).entries[0].fields
    assert (back.before, back.after) == (change.after, change.before)


def test_two_functions_of_one_name_are_a_change():
    def first(*args):
        return None

    def second(*args):
        return None

    second.__qualname__ = first.__qualname__
    before = backend(add()._set_root_node_getter(first))
    assert diff(before, backend(add()._set_root_node_getter(second)))


def test_the_form_of_a_pattern_matters_with_a_fuser():
    fuser = SequentialFuser(torch.nn.Sequential)
    forward = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU)).set_fuser_method(fuser)
    nested = BackendPatternConfig()._set_pattern_complex_format((torch.nn.ReLU, torch.nn.Linear))
    assert changes(backend(forward), backend(nested.set_fuser_method(fuser))) == [
        "~ pattern: forward form ⇒ reversed form"
    ]


def test_order():
    entries = [BackendPatternConfig(op) for op in (torch.add, torch.mul, torch.sub)]
    assert changes(backend(*entries), backend(entries[1], entries[0], entries[2])) == [
        "~ order: torch.add at place 0 of those in both ⇒ torch.mul (2 places differ)"
    ]


def test_entries_added_and_removed():
    result = diff(backend(add(STATIC)), backend(BackendPatternConfig(torch.mul)))
    assert [(e.pattern, e.kind) for e in result.entries] == [
        ("torch.add", "removed"),
        ("torch.mul", "added"),
    ]
    assert str(result.entries[0].fields[0]) == "- dtype_configs: quint8 → quint8"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(BackendDefaults)])
def test_every_field_of_the_defaults_has_a_line(field):
    values = {
        "overrides": (DefaultOverride(operators=("view",), qat_output=MINMAX),),
        "leave_float": (LeaveFloat((torch.add,), after=(torch.nn.Linear,)),),
    }
    defaults = BackendDefaults(MINMAX, MINMAX)
    changed = dataclasses.replace(defaults, **{field: values.get(field, HISTOGRAM)})
    first, second = (BackendConfig("mine").set_defaults(d) for d in (defaults, changed))
    (change,) = changes(first, second)
    assert field.partition("_")[0] in change or field in change
    assert "order" not in change
    if field == "overrides":
        assert "qat_output minmax" in change
    if field not in values:
        assert any("histogram" in line for line in default_lines(second))


def test_defaults():
    plain = BackendConfig("mine")
    defaults = BackendDefaults(MINMAX, MINMAX)
    changed = BackendDefaults(HISTOGRAM, MINMAX, overrides=(DefaultOverride(("view",), MINMAX),))
    with_defaults = BackendConfig("mine").set_defaults(defaults)
    assert changes(plain, with_defaults) == [
        "+ defaults.activation: minmax, quint8",
        "+ defaults.weight: minmax, quint8",
    ]
    assert changes(with_defaults, BackendConfig("mine").set_defaults(changed)) == [
        "~ defaults.activation: minmax, quint8 ⇒ histogram, quint8",
        "+ defaults.overrides[.view()]: activation minmax, quint8",
    ]


def test_the_order_of_overrides_is_a_change():
    overrides = (DefaultOverride(("view",), MINMAX), DefaultOverride(("relu",), MINMAX))
    first = BackendConfig("mine").set_defaults(BackendDefaults(MINMAX, MINMAX, overrides=overrides))
    second = BackendConfig("mine").set_defaults(
        BackendDefaults(MINMAX, MINMAX, overrides=overrides[::-1])
    )
    [change] = diff(first, second).fields
    assert change.field == "defaults.overrides order"


def test_to_dict_is_json():
    result = diff(get_backend_config("x86"), get_backend_config("qnnpack"))
    data = json.loads(json.dumps(result.to_dict()))
    assert (data["first"], data["second"]) == ("x86", "qnnpack")
    linear = next(entry for entry in data["entries"] if entry["pattern"] == "nn.Linear")
    assert linear["kind"] == "changed"
    assert any("qint8, scale ≥ 2**-12" in field["after"] for field in linear["fields"])


def test_render_groups_patterns_with_the_same_changes():
    text = diff(get_backend_config("x86"), get_backend_config("qnnpack")).render()
    lines = text.splitlines()
    assert lines[0].startswith("x86 ⇒ qnnpack: 0 entries added, 6 removed")
    assert "- .shape(), .size()" in lines
    assert len(lines) < 100
    assert max(len(line) for line in lines if line.startswith(("~ nn.", "  "))) <= 160


def test_method_of_the_config():
    first, second = get_backend_config("x86"), get_backend_config("onednn")
    assert first.diff(second) == diff(first, second)


def test_empty_exactly_when_equal(any_pair):
    from hypothesis import given, settings

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(any_pair)
    def check(pair) -> None:
        first, second = pair
        result = diff(first, second)
        assert bool(result) == (first != second)
        assert result.render()
        json.dumps(result.to_dict())

    check()


@pytest.fixture
def any_pair():
    """Two backends that often differ in one place only."""
    from hypothesis import strategies as st

    configs = st.lists(st.sampled_from([STATIC, BOUNDED, OTHER]), max_size=2)
    operators = st.sampled_from([torch.add, torch.mul, "view"])
    entry = st.builds(
        lambda op, dtypes, share: (
            BackendPatternConfig(op)
            .set_dtype_configs(dtypes)
            .set_observation_type(ObservationType(share))
        ),
        operators,
        configs,
        st.integers(0, 2),
    )
    backends = st.lists(entry, max_size=3).map(lambda entries: backend(*entries))
    return st.tuples(backends, backends)
