"""What the tests of spec files share: strategies for configs, and folders of files."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DefaultOverride,
    DTypeConfig,
    DTypeWithConstraints,
    ForwardFuser,
    KnownSlower,
    LeaveFloat,
    MatchAllNode,
    ObservationType,
    QDQRules,
    QuantDefault,
    ReversedFuser,
    SequentialFuser,
    from_reversed,
    normal_form,
)
from backquant.nn.intrinsic.fusers import fuse_conv_bn, fuse_linear_bn

OPERATORS = [
    torch.nn.Conv2d,
    torch.nn.ReLU,
    torch.nn.Linear,
    torch.add,
    operator.add,
    operator.getitem,
    getattr,
    torch.nn.functional.relu,
    torch.nn.functional.avg_pool2d,
    torch.nn.functional.max_pool2d,
    torch.ops.aten.addmm.default,
    torch.ops.aten.add,
    "view",
    "relu_",
]
MODULES = [torch.nn.Conv2d, torch.nn.Linear, torch.nn.Sequential]
DTYPES = [
    *(torch.quint8, torch.qint8, torch.quint4x2, torch.uint8, torch.int8, torch.int16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn),
]
finite = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.one_of(st.integers(-(2**31), 2**31), finite, st.integers(-40, 8).map(lambda e: 2.0**e))
# Text that UTF-8 can carry.
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


constraints = st.builds(
    DTypeWithConstraints,
    dtype=maybe(st.sampled_from(DTYPES)),
    quant_min_lower_bound=maybe(numbers),
    quant_max_upper_bound=maybe(numbers),
    scale_min_lower_bound=maybe(numbers),
    scale_max_upper_bound=maybe(numbers),
    scale_exact_match=maybe(numbers),
    zero_point_exact_match=maybe(st.integers(-300, 300)),
    scales=maybe(st.lists(st.floats(2**-20, 4.0), max_size=3).map(tuple)),
    scale_range=maybe(st.tuples(maybe(st.just(2**-12)), maybe(st.just(0.5)))),
    symmetric=maybe(st.booleans()),
    granularity=maybe(st.sampled_from(["per_tensor", "per_channel"])),
    ch_axis=maybe(st.integers(-2, 4)),
    power_of_two_scale=maybe(st.booleans()),
)
dtype_configs = st.builds(
    DTypeConfig,
    input_dtype=constraints,
    output_dtype=constraints,
    weight_dtype=constraints,
    bias_dtype=maybe(st.sampled_from(DTYPES)),
    is_dynamic=maybe(st.booleans()),
    bias_scale=maybe(st.just("input_times_weight")),
)
reversed_patterns = st.recursive(
    st.sampled_from([*OPERATORS, MatchAllNode]) | st.sampled_from([0, 1.5, True, torch.float16]),
    lambda inner: (
        st.tuples(st.sampled_from(OPERATORS), inner)
        | st.tuples(st.sampled_from(OPERATORS), inner, inner)
    ),
    max_leaves=5,
)
fusers = st.recursive(
    st.builds(SequentialFuser, st.sampled_from(MODULES), st.integers(1, 4))
    | st.sampled_from([fuse_conv_bn, fuse_linear_bn]),
    lambda inner: st.builds(ReversedFuser, inner) | st.builds(ForwardFuser, inner),
    max_leaves=2,
)


def _is_pattern(pattern: object) -> bool:
    try:
        from_reversed(pattern)
    except ValueError:
        return False
    return True


@st.composite
def entries(draw: st.DrawFn) -> BackendPatternConfig:
    entry = BackendPatternConfig()
    if draw(st.booleans()):
        forward = draw(st.lists(st.sampled_from(OPERATORS), min_size=1, max_size=4))
        pattern = forward[0] if len(forward) == 1 else tuple(forward)
        try:
            normal_form(pattern)
        except ValueError:
            pattern = torch.add
        entry.set_pattern(pattern)
    else:
        entry._set_pattern_complex_format(draw(reversed_patterns.filter(_is_pattern)))
    entry.set_observation_type(draw(st.sampled_from(ObservationType)))
    entry.set_dtype_configs(draw(st.lists(dtype_configs, max_size=3)))
    module = maybe(st.sampled_from(MODULES))
    entry.set_root_module(draw(module)).set_qat_module(draw(module))
    entry.set_reference_quantized_module(draw(module)).set_fused_module(draw(module))
    entry.set_fuser_method(draw(maybe(fusers)))
    entry._set_root_node_getter(draw(maybe(st.just(fuse_conv_bn))))
    entry._set_extra_inputs_getter(draw(maybe(st.just(fuse_linear_bn))))
    kinds = st.sampled_from(ObservationType)
    entry._set_num_tensor_args_to_observation_type(
        draw(st.dictionaries(st.integers(0, 9), kinds, max_size=2))
    )
    places = st.dictionaries(st.sampled_from(["weight", "bias"]), st.integers(0, 9))
    entry._set_input_type_to_index(draw(places))
    entry._set_input_output_observed(draw(st.none() | st.booleans()))
    return entry


quant_defaults = st.builds(
    QuantDefault,
    observer=st.sampled_from(["histogram", "minmax", "placeholder"]),
    dtype=maybe(st.sampled_from(DTYPES)),
    qscheme=maybe(st.sampled_from([torch.per_tensor_affine, torch.per_channel_symmetric])),
    reduce_range=maybe(st.booleans()),
    eps=maybe(st.floats(1e-12, 1.0)),
    averaging_constant=maybe(st.floats(0.0, 1.0)),
    fake_quantize=maybe(st.sampled_from(["fake_quantize", "fused_moving_average"])),
)
defaults = st.builds(
    BackendDefaults,
    activation=quant_defaults,
    weight=quant_defaults,
    qat_activation=maybe(quant_defaults),
    qat_weight=maybe(quant_defaults),
    overrides=st.sampled_from([(), (torch.nn.Linear,), ("view", torch.conv2d)]).map(
        lambda operators: (DefaultOverride(operators, QuantDefault("noop")),) if operators else ()
    ),
    leave_float=st.lists(
        st.builds(
            LeaveFloat,
            st.sampled_from([(torch.add,), (torch.add, "add", torch.mul)]),
            st.sampled_from([(torch.nn.Linear,), (torch.nn.Linear, torch.nn.functional.linear)]),
            st.sampled_from([(), (torch.nn.LayerNorm,)]),
            st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
)


qdq_rules = st.builds(
    QDQRules,
    quantize_constants=st.booleans(),
    leave_float=st.sampled_from(
        [
            (),
            (
                LeaveFloat((torch.add, "add"), unless_between_quantized=True),
                LeaveFloat((len,), results=True),
            ),
        ]
    ),
    epilogues=st.sampled_from([(), (torch.relu,)]),
)


known_slower = st.builds(
    KnownSlower,
    st.sampled_from([("conv2d",), ("linear", "conv1d")]),
    st.sampled_from([{"rank": {"min": 2}}, {"not": {"shape": "static"}}]),
    words.filter(str.strip),
    st.floats(2.0, 1e6),
    st.sampled_from([1, 0.25]),
)


@st.composite
def backends(draw: st.DrawFn) -> BackendConfig:
    config = BackendConfig(draw(words)).set_engine(draw(maybe(words)))
    config.set_defaults(draw(maybe(defaults)))
    config.set_qdq(draw(maybe(qdq_rules)))
    config.set_slower(draw(st.lists(known_slower, max_size=2)))
    return config.set_backend_pattern_configs(draw(st.lists(entries(), max_size=5)))


@pytest.fixture(scope="session")
def any_backend() -> st.SearchStrategy[BackendConfig]:
    """A strategy for descriptions that a file can hold."""
    return backends()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """``write(name, text)``: a file in a fresh folder."""

    def make(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return make
