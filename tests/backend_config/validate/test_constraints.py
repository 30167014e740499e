"""One test per rule: what is found, and a neighbour that is not."""

from __future__ import annotations

import pytest
import torch

from backquant.backend_config import DTypeWithConstraints
from backquant.backend_config.dtype_rules import Place, constraint_findings

PLACE = Place(0, "torch.add").at("dtype_configs[0]").at("input_dtype")


def found(dtype: torch.dtype | None = torch.quint8, **fields: object) -> list[tuple[str, str]]:
    given = DTypeWithConstraints(dtype, **fields)  # type: ignore[arg-type]
    return [(finding.severity, finding.rule) for finding in constraint_findings(given, PLACE)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"quant_min_lower_bound": 0, "quant_max_upper_bound": 255}, []),
        (
            {"quant_min_lower_bound": 9, "quant_max_upper_bound": 3},
            [("error", "bounds-order")],
        ),
        ({"quant_min_lower_bound": 3, "quant_max_upper_bound": 3}, [("error", "bounds-order")]),
        (
            {"scale_min_lower_bound": 1.0, "scale_max_upper_bound": 0.5},
            [("error", "bounds-order")],
        ),
        ({"quant_min_lower_bound": 0}, [("note", "bounds-half-set")]),
        ({"quant_max_upper_bound": 127}, [("note", "bounds-half-set")]),
        ({"scale_min_lower_bound": 2**-12}, []),
        (
            {"quant_min_lower_bound": -1, "quant_max_upper_bound": 256},
            [("warning", "bounds-unreachable")] * 2,
        ),
        (
            {"quant_min_lower_bound": 256, "quant_max_upper_bound": 300},
            [("error", "bounds-unreachable"), ("warning", "bounds-unreachable")],
        ),
        (
            {"quant_min_lower_bound": -9, "quant_max_upper_bound": -1},
            [("warning", "bounds-unreachable"), ("error", "bounds-unreachable")],
        ),
        ({"scale_max_upper_bound": 0.0}, [("error", "bounds-unreachable")]),
        ({"scale_min_lower_bound": 0.0}, [("warning", "bounds-unreachable")]),
        ({"scale_exact_match": 1 / 256, "zero_point_exact_match": 0}, []),
        ({"scale_exact_match": 1 / 256}, [("error", "fixed-qparams")]),
        ({"zero_point_exact_match": 0}, []),
        ({"zero_point_exact_match": 256}, [("error", "fixed-qparams")]),
        ({"scales": (2**-8, 1.0), "scale_range": (2**-12, None)}, []),
        ({"scales": ()}, [("error", "scale-domain")]),
        ({"scales": (0.5, -1.0)}, [("error", "scale-domain")]),
        ({"scales": (0.3, 0.7), "power_of_two_scale": True}, [("error", "scale-domain")]),
        ({"scales": (0.3, 0.5), "power_of_two_scale": True}, [("warning", "scale-domain")]),
        ({"scales": (2.0,), "scale_max_upper_bound": 1.0}, [("error", "scale-domain")]),
        ({"scale_dtype": torch.float8_e8m0fnu}, []),
        ({"scale_dtype": torch.int8}, [("error", "scale-domain")]),
        ({"scale_dtype": torch.float8_e4m3fn}, [("error", "scale-domain")]),
        ({"scale_dtype": torch.float8_e8m0fnu, "scales": (1.0,)}, [("error", "scale-domain")]),
        ({"scale_range": (1.0, 0.5)}, [("error", "scale-domain")]),
        ({"scale_range": (0.0, 0.5)}, [("error", "scale-domain")]),
        (
            {"scales": (1.0,), "scale_exact_match": 1.0, "zero_point_exact_match": 0},
            [("error", "scale-domain")],
        ),
        (
            {"scale_exact_match": -1.0, "zero_point_exact_match": 0},
            [("error", "fixed-qparams")],
        ),
        (
            {"scale_exact_match": 0.1, "zero_point_exact_match": 256},
            [("error", "fixed-qparams")],
        ),
        (
            {
                "scale_exact_match": 0.1,
                "zero_point_exact_match": 128,
                "quant_min_lower_bound": 0,
                "quant_max_upper_bound": 127,
            },
            [("error", "fixed-qparams")],
        ),
        (
            {
                "scale_exact_match": 0.1,
                "zero_point_exact_match": 0,
                "scale_max_upper_bound": 0.05,
            },
            [("error", "fixed-qparams")],
        ),
        ({"granularity": "per_tensor"}, []),
        ({"granularity": "per_channel", "ch_axis": 0}, []),
        ({"granularity": "per_tensor", "ch_axis": 0}, [("error", "extended-constraints")]),
        (
            {
                "granularity": "per_channel",
                "scale_exact_match": 0.1,
                "zero_point_exact_match": 0,
            },
            [("error", "extended-constraints")],
        ),
        (
            {
                "power_of_two_scale": True,
                "scale_exact_match": 0.1,
                "zero_point_exact_match": 0,
            },
            [("error", "extended-constraints")],
        ),
        (
            {
                "power_of_two_scale": True,
                "scale_exact_match": 0.125,
                "zero_point_exact_match": 0,
            },
            [],
        ),
        (
            {
                "power_of_two_scale": True,
                "scale_min_lower_bound": 0.3,
                "scale_max_upper_bound": 0.4,
            },
            [("error", "extended-constraints")],
        ),
        (
            {
                "power_of_two_scale": True,
                "scale_min_lower_bound": 0.25,
                "scale_max_upper_bound": 0.4,
            },
            [],
        ),
        (
            {"symmetric": True, "scale_exact_match": 0.1, "zero_point_exact_match": 0},
            [("error", "extended-constraints")],
        ),
        ({"symmetric": True, "scale_exact_match": 0.1, "zero_point_exact_match": 128}, []),
        ({"symmetric": False, "scale_exact_match": 0.1, "zero_point_exact_match": 0}, []),
    ],
)
def test_rules_on_quint8(fields, expected):
    assert found(**fields) == expected


def test_symmetric_signed_values_are_centred_on_zero():
    fixed = {"scale_exact_match": 0.1, "symmetric": True}
    assert found(torch.qint8, zero_point_exact_match=0, **fixed) == []
    assert found(torch.qint8, zero_point_exact_match=128, **fixed) == [
        ("error", "fixed-qparams"),
        ("error", "extended-constraints"),
    ]


def test_bounds_on_a_float_dtype_have_no_effect():
    assert (
        found(torch.float16, quant_min_lower_bound=0, quant_max_upper_bound=1)
        == [("warning", "bounds-unreachable")] * 2
    )


def test_constraints_without_a_dtype():
    assert found(None, quant_min_lower_bound=9, quant_max_upper_bound=3) == [
        ("warning", "constraints-without-dtype")
    ]


def test_a_finding_says_where_what_and_how_to_mend_it():
    given = DTypeWithConstraints(
        torch.qint8, quant_max_upper_bound=-200, quant_min_lower_bound=-128
    )
    messages = [str(finding) for finding in constraint_findings(given, PLACE)]
    assert messages == [
        "error: entry 0 (torch.add): dtype_configs[0].input_dtype: quant_min_lower_bound -128 is above "
        "quant_max_upper_bound -200: nothing is supported [bounds-order]\n  fix  swap the two bounds",
        "error: entry 0 (torch.add): dtype_configs[0].input_dtype: quant_max_upper_bound -200 admits "
        "nothing: the dtype holds -128 to 127 [bounds-unreachable]\n"
        "  fix  choose a bound that the dtype holds",
    ]
