"""Dict configs that functions of the flow are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest

HEAD = "from torch.ao.quantization.quantize_fx import prepare_fx\n"
NEW = "from backquant import prepare_fx, QConfigMapping\n"


def test_a_literal_becomes_setters(becomes: Callable[..., None]) -> None:
    becomes(
        HEAD + 'prepare_fx(m, {"": q, "module_name": [("fc", None)]}, x)\n',
        NEW + 'prepare_fx(m, QConfigMapping().set_global(q).set_module_name("fc", None), x)\n',
    )


def test_many_lines_stay_many_lines(becomes: Callable[..., None]) -> None:
    becomes(
        HEAD
        + """\
def f():
    p = prepare_fx(
        m,
        {
            "": q,
            "object_type": ((A, None), [B, q]),
        },
        x,
    )
""",
        NEW
        + """\
def f():
    p = prepare_fx(
        m,
        QConfigMapping()
        .set_global(q)
        .set_object_type(A, None)
        .set_object_type(B, q),
        x,
    )
""",
    )


def test_a_variable_is_followed_to_its_only_assignment(becomes: Callable[..., None]) -> None:
    becomes(
        HEAD
        + """\
config = {"": first, "object_type": [(torch_nn_Linear, None), (torch_nn_Conv2d, second)]}
def f():
    other = {"": None}
    return prepare_fx(m, config, x), prepare_fx(n, other, x)
def g():
    other = {"": q}
    return prepare_fx(n, qconfig_mapping=other, example_inputs=x)
""",
        NEW
        + """\
config = (
    QConfigMapping()
    .set_global(first)
    .set_object_type(torch_nn_Linear, None)
    .set_object_type(torch_nn_Conv2d, second)
)
def f():
    other = QConfigMapping().set_global(None)
    return prepare_fx(m, config, x), prepare_fx(n, other, x)
def g():
    other = QConfigMapping().set_global(q)
    return prepare_fx(n, qconfig_mapping=other, example_inputs=x)
""",
    )


@pytest.mark.parametrize(
    "before",
    [
        'c = {"": q}\nc["object_type"] = []\n',
        'c = {"": q}\nprint(c)\n',
        "c = {key: q}\n",
        'c = {"": q, **more}\n',
        'c = {"": q, "object_type": types}\n',
        'c = {"": q, "object_type": [*types]}\n',
        'c = {"": q, "object_type": [(A, B, q)]}\n',
        'c = {"": q, "": r}\n',
        "c = {k: v for k, v in pairs}\n",
        "c = dict(pairs)\n",
        'c: dict = {"": q}\n',
        'if x:\n    c = {"": q}\nelse:\n    c = {"": r}\n',
        'c = {\n    # the rest\n    "": q,\n}\n',
    ],
)
def test_any_other_dict_is_wrapped(becomes: Callable[..., None], before: str) -> None:
    becomes(
        HEAD + before + "prepare_fx(m, c, x)\n",
        NEW + before + "prepare_fx(m, QConfigMapping.from_dict(c), x)\n",
    )


@pytest.mark.parametrize(
    "before",
    [
        "def f(c):\n    prepare_fx(m, c, x)\n",
        "c = QConfigMappingOfMine()\nprepare_fx(m, c, x)\n",
        "from configs import c\nprepare_fx(m, c, x)\n",
        "prepare_fx(m, self.config, x)\n",
        "prepare_fx(m, *rest)\n",
        "a, c = pair\nprepare_fx(m, c, x)\n",
        "c = None\nc = {}\nprepare_fx(m, c, x)\n",
        "dict = f\nprepare_fx(m, dict(1), x)\n",
    ],
)
def test_what_may_be_something_else_stays(becomes: Callable[..., None], before: str) -> None:
    becomes(HEAD + before, "from backquant import prepare_fx\n" + before)


def test_custom_configs(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization.quantize_fx import prepare_fx
        prepare_fx(m, q, x, {"input_quantized_idxs": [0], "non_traceable_module_class": [A]})
        prepare_fx(m, q, x, {"float_to_observed_custom_module_class": {"static": {A: B, C: D}}})
        c = {"float_to_observed_custom_module_class": {"dynamic": {A: B}}}
        prepare_fx(m, q, x, c)
        c = {"standalone_module_name": [("a", None, (x,), None, None)]}
        prepare_fx(m, q, x, c)
        """,
        """
        from backquant import prepare_fx, PrepareCustomConfig
        prepare_fx(m, q, x, PrepareCustomConfig()
            .set_input_quantized_indexes([0])
            .set_non_traceable_module_classes([A]))
        prepare_fx(m, q, x, PrepareCustomConfig()
            .set_float_to_observed_mapping(A, B)
            .set_float_to_observed_mapping(C, D))
        c = {"float_to_observed_custom_module_class": {"dynamic": {A: B}}}
        prepare_fx(m, q, x, PrepareCustomConfig.from_dict(c))
        c = {"standalone_module_name": [("a", None, (x,), None, None)]}
        prepare_fx(m, q, x, PrepareCustomConfig.from_dict(c))
        """,
    )


def test_backends_and_fusion(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch.ao.quantization.quantize_fx as qfx
        backend = {"name": "mine", "configs": []}
        custom = {"preserved_attributes": []}
        qfx.fuse_fx(m, custom, backend)
        """,
        """
        import backquant as qfx
        backend = {"name": "mine", "configs": []}
        custom = qfx.FuseCustomConfig().set_preserved_attributes([])
        qfx.fuse_fx(m, custom, qfx.BackendConfig.from_dict(backend))
        """,
    )


def test_keys_that_moved(migrated: Callable[..., object]) -> None:
    result = migrated(
        HEAD + 'prepare_fx(m, {"": q, "modul_name": []}, x, {"additional_quant_pattern": {}})\n'
    )
    assert [(f.kind, f.what) for f in result.findings] == [  # type: ignore[attr-defined]
        ("old dict keys", "QConfigMapping key 'modul_name'"),
        ("old dict keys", "PrepareCustomConfig key 'additional_quant_pattern'"),
    ]


@pytest.mark.parametrize(
    ("imports", "after", "name"),
    [
        (
            "import torch.ao.quantization.quantize_fx as q\nfrom torch.ao.quantization import "
            "QConfigMapping as M\n",
            "import backquant as q\nfrom backquant import QConfigMapping as M\n",
            "q.",
        ),
        (
            "from torch.ao.quantization import quantize_fx as q, fuse_known_modules\nQConfigMapping = 1\n",
            "import backquant as q\nfrom torch.ao.quantization import fuse_known_modules\n"
            "QConfigMapping = 1\n",
            "q.",
        ),
    ],
)
def test_the_class_is_spelled_like_its_function(
    migrated: Callable[..., object], imports: str, after: str, name: str
) -> None:
    result = migrated(imports + 'q.prepare_fx(m, {"": None}, x)\n')
    mapping = f"{name}QConfigMapping().set_global(None)"
    assert result.after == after + f"q.prepare_fx(m, {mapping}, x)\n"  # type: ignore[attr-defined]


def test_an_import_of_the_class_is_used_where_it_is_seen(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization import QConfigMapping
        from torch.ao.quantization.quantize_fx import prepare_fx
        prepare_fx(m, {"": None}, x)
        """,
        """
        from backquant import QConfigMapping
        from backquant import prepare_fx
        prepare_fx(m, QConfigMapping().set_global(None), x)
        """,
    )


def test_a_foreign_class_of_the_same_name(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization.quantize_fx import prepare_fx
        from mine import QConfigMapping
        prepare_fx(m, {"": None}, x)
        """,
        """
        import backquant
        from backquant import prepare_fx
        from mine import QConfigMapping
        prepare_fx(m, backquant.QConfigMapping().set_global(None), x)
        """,
    )


def test_the_setters_mean_what_the_dict_means(migrated: Callable[..., object]) -> None:
    """The rewritten mapping equals the one that ``from_dict`` makes of the literal."""
    import torch
    from torch import nn

    import backquant

    literal = """{
        "module_name_object_type_order": [("fc", nn.Linear, 0, q)],
        "object_type": [(nn.Linear, None), (torch.add, q), ("reshape", q)],
        "module_name_regex": [("a.*", q), ("b", None)],
        "": q,
        "module_name": [("fc", None)],
    }"""
    seen = {}
    scope = {"q": backquant.default_qconfig, "nn": nn, "torch": torch, "m": 1, "x": 1}
    code = f"from torch.ao.quantization.quantize_fx import prepare_fx\nprepare_fx(m, {literal}, x)"
    after = migrated(code + "\n").after  # type: ignore[attr-defined]
    assert "from_dict" not in after
    body = after.replace("prepare_fx, ", "")
    exec(body, scope | {"prepare_fx": lambda m, mapping, x: seen.update(mapping=mapping)})
    assert seen["mapping"] == backquant.QConfigMapping.from_dict(eval(literal, scope))
