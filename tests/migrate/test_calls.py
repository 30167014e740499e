"""Calls whose arguments have changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

HEAD = "from torch.ao.quantization import quantize_fx as fx\n"
NEW = "import backquant as fx\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fx.prepare_fx(m, qconfig_dict=q, example_inputs=x)", "qconfig_mapping=q"),
        ("fx.prepare_fx(m, q, x, prepare_custom_config_dict=c)", "prepare_custom_config=c"),
        ("fx.prepare_qat_fx(m, q, x, backend_config_dict=b)", "backend_config=b"),
        ("fx.fuse_fx(m, fuse_custom_config_dict=c)", "fuse_custom_config=c"),
    ],
)
def test_keywords(migrated: Callable[..., object], before: str, after: str) -> None:
    result = migrated(f"{HEAD}{before}\n")
    assert after in result.after  # type: ignore[attr-defined]
    assert result.findings == ()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fx.convert_fx(p, is_reference=True)", "fx.convert_to_reference_fx(p)"),
        ("fx.convert_fx(p, is_reference=False)", "fx.convert_fx(p)"),
        ("fx.convert_fx(p, is_reference=True, )", "fx.convert_to_reference_fx(p, )"),
        ("fx.convert_fx(is_reference=False, graph_module=p)", "fx.convert_fx(graph_module=p)"),
        (
            "fx._convert_to_reference_decomposed_fx(p)",
            'fx.convert_to_reference_fx(p, dialect="decomposed")',
        ),
        (
            "fx._convert_to_reference_decomposed_fx(p,)",
            'fx.convert_to_reference_fx(p,dialect="decomposed")',
        ),
    ],
)
def test_conversion(becomes: Callable[..., None], before: str, after: str) -> None:
    becomes(f"{HEAD}{before}\n", f"{NEW}{after}\n")


def test_conversion_by_name(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.quantization.quantize_fx import convert_fx
        convert_fx(p, is_reference=True)
        """,
        """
        from backquant import convert_fx, convert_to_reference_fx
        convert_to_reference_fx(p)
        """,
    )


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("fx.prepare_fx(m, q)", "prepare_fx without example_inputs"),
        ("fx.prepare_fx(m, q, _equalization_config=e, example_inputs=x)", "_equalization_config"),
        ("fx.prepare_fx(m, q, x, None, e)", "_equalization_config"),
        ("fx.convert_fx(p, is_reference=flag)", "is_reference"),
        ("fx.prepare_fx(m, q, x, inplace=True)", "prepare_fx with inplace"),
        ("fx.prepare_qat_fx(m, q, x, equalization_qconfig_dict=e)", "_equalization_config"),
        ('fx.prepare_fx(m, q, {"preserved_attributes": []})', "a custom config third"),
    ],
)
def test_what_needs_a_person(migrated: Callable[..., object], call: str, what: str) -> None:
    result = migrated(f"{HEAD}{call}\n")
    assert [f.kind for f in result.findings] == ["arguments"]  # type: ignore[attr-defined]
    assert what in result.findings[0].what  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "call",
    [
        "fx.prepare_fx(*arguments)",
        "fx.prepare_fx(m, **arguments)",
        "fx.prepare_fx(m, q, x, None, None)",
        "fx.prepare_fx(m, q, x, _equalization_config=None)",
        "f(fx.prepare_fx)",
        "fx.convert_fx(p, None, False, mapping, backend, True)",
        "fx.convert_fx(p, _remove_qconfig=False, keep_original_weights=True)",
    ],
)
def test_what_is_left_alone(becomes: Callable[..., None], call: str) -> None:
    becomes(f"{HEAD}{call}\n", f"{NEW}{call}\n")


def test_dicts_of_default_qconfigs(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization import get_default_qconfig_dict, quantize_fx as fx
        fx.prepare_fx(m, get_default_qconfig_dict("x86"), x)
        a = get_default_qconfig_dict("x86")
        fx.prepare_fx(m, a, x)
        b = get_default_qconfig_dict("x86")
        b["object_type"] = []
        fx.prepare_fx(m, b, x)
        """,
        """
        import backquant as fx
        from backquant import get_default_qconfig_mapping
        fx.prepare_fx(m, get_default_qconfig_mapping("x86"), x)
        a = get_default_qconfig_mapping("x86")
        fx.prepare_fx(m, a, x)
        b = get_default_qconfig_mapping("x86").to_dict()
        b["object_type"] = []
        fx.prepare_fx(m, fx.QConfigMapping.from_dict(b), x)
        """,
    )
