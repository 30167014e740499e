"""Star imports."""

from __future__ import annotations

from collections.abc import Callable

from backquant.migrate import migrate_source


def test_names_that_are_used_are_imported(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.quantization import *
        def f(default_observer):
            return QConfig(default_observer, MinMaxObserver), print, undefined
        QuantStub()
        """,
        """
        from backquant import MinMaxObserver, QConfig
        from backquant.nn import QuantStub
        def f(default_observer):
            return QConfig(default_observer, MinMaxObserver), print, undefined
        QuantStub()
        """,
    )


def test_each_name_is_imported_where_a_star_has_it(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization.quantize_fx import *
        from torch.ao.quantization.observer import *
        from torch.ao.nn.intrinsic import *
        prepare_fx(ConvReLU2d, {"": HistogramObserver}, x)
        """,
        """
        from backquant import prepare_fx, QConfigMapping
        from backquant.observe import HistogramObserver
        from backquant.nn.intrinsic import ConvReLU2d
        prepare_fx(ConvReLU2d, QConfigMapping().set_global(HistogramObserver), x)
        """,
    )


def test_names_that_need_a_person_are_imported_by_name(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization import *
        get_fuser_method(QConfig)
        """,
        """
        from torch.ao.quantization import get_fuser_method
        from backquant import QConfig
        get_fuser_method(QConfig)
        """,
        [(2, "fusers")],
    )


def test_eager_mode_holds_the_file(becomes: Callable[..., None]) -> None:
    code = "from torch.ao.quantization import *\nprepare(model)\nQConfig\n"
    becomes(code, code, [(2, "eager mode")])


def test_a_star_of_which_nothing_is_used(becomes: Callable[..., None]) -> None:
    code = "from torch.ao.quantization import *\n"
    becomes(code, code, [(1, "star import")])


def test_quantized_modules_cannot_be_listed(becomes: Callable[..., None]) -> None:
    code = "from torch.nn.quantized import *\nFloatFunctional(), Linear()\n"
    becomes(code, code, [(1, "star import")])


def test_a_package_may_be_imported_for_it() -> None:
    code = "from torch.ao.quantization import *\nQConfig\n"
    result = migrate_source(code, "mine/__init__.py")
    assert result.after == code
    assert [f.kind for f in result.findings] == ["star import"]


def test_other_stars_are_left_alone(becomes: Callable[..., None]) -> None:
    code = "from torch.nn import *\nfrom .quantization import *\nQConfig\n"
    becomes(code, code)
