"""Names that are imported one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def test_the_import_changes_and_the_uses_stay(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization import QConfig as Q, MinMaxObserver
        from torch.quantization.observer import HistogramObserver
        Q(MinMaxObserver, HistogramObserver.with_args(bins=8))
        """,
        """
        from backquant import QConfig as Q, MinMaxObserver
        from backquant.observe import HistogramObserver
        Q(MinMaxObserver, HistogramObserver.with_args(bins=8))
        """,
    )


def test_a_statement_is_split_by_where_its_names_go(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization import QuantStub, QConfig, fuse_known_modules, fuse_conv_bn
        fuse_known_modules(QConfig, QuantStub)
        """,
        """
        from backquant.nn import QuantStub
        from backquant import QConfig
        from backquant.nn.intrinsic.fusers import fuse_conv_bn
        from torch.ao.quantization import fuse_known_modules
        fuse_known_modules(QConfig, QuantStub)
        """,
        [(2, "fusion by name")],
    )


def test_layout_and_comments_of_the_statement_stay(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization import (  # all we need
            QConfig,  # a pair
            fuse_known_modules,
            # the mapping
            QConfigMapping,
        )  # noqa: F401
        fuse_known_modules
        """,
        """
        from backquant import (  # all we need
            QConfig,  # a pair
            # the mapping
            QConfigMapping,
        )
        from torch.ao.quantization import (  # all we need
            fuse_known_modules,
        )  # noqa: F401
        fuse_known_modules
        """,
        [(7, "fusion by name")],
    )


def test_aligned_names_stay_aligned(becomes: Callable[..., None]) -> None:
    becomes(
        """
        if True:
            from torch.ao.quantization import (QConfig, QuantStub,
                                               QConfigMapping,  # the mapping
                                               MinMaxObserver)
            from torch.ao.quantization.observer import (
                                            HistogramObserver,
                FixedQParamsObserver)
        """,
        """
        if True:
            from backquant import (QConfig, QConfigMapping,  # the mapping
                                   MinMaxObserver)
            from backquant.nn import (QuantStub)
            from backquant.observe import (
                                            HistogramObserver,
                FixedQParamsObserver)
        """,
    )


def test_an_unused_name_is_reported_at_its_import_and_holds_nothing(
    becomes: Callable[..., None],
) -> None:
    becomes(
        "from torch.ao.quantization import prepare, QConfig\n",
        "from backquant import QConfig\nfrom torch.ao.quantization import prepare\n",
        [(1, "eager mode")],
    )


def test_functions_under_another_name(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.quantization import get_default_qconfig_dict
        from torch.nn.intrinsic.modules.fused import _FusedModule
        from torch.ao.quantization.observer import _is_activation_post_process as is_observer
        config = get_default_qconfig_dict("x86")
        class Fused(_FusedModule): pass
        is_observer(Fused)
        """,
        """
        from backquant import get_default_qconfig_mapping
        from backquant.nn.intrinsic import FusedModule
        from backquant import is_observer_or_fake_quantize as is_observer
        config = get_default_qconfig_mapping("x86").to_dict()
        class Fused(FusedModule): pass
        is_observer(Fused)
        """,
    )


def test_another_name_that_is_taken(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.nn.intrinsic.modules.fused import _FusedModule
        class FusedModule(_FusedModule): pass
        """,
        """
        from backquant.nn.intrinsic import FusedModule as _FusedModule
        class FusedModule(_FusedModule): pass
        """,
    )


def test_a_function_that_gave_a_dict_and_is_passed_on(becomes: Callable[..., None]) -> None:
    code = """
    from torch.quantization import get_default_qconfig_dict
    list(map(get_default_qconfig_dict, ["x86"]))
    """
    becomes(code, code.replace("    ", ""), [(2, "old functions")])


def test_two_sources_of_one_name(becomes: Callable[..., None]) -> None:
    becomes(
        """
        try:
            from torch.ao.quantization.fake_quantize import FakeQuantize
        except ImportError:
            from torch.quantization import FakeQuantize
        FakeQuantize()
        """,
        """
        try:
            from backquant.observe import FakeQuantize
        except ImportError:
            from backquant import FakeQuantize
        FakeQuantize()
        """,
    )


def test_a_name_that_may_be_something_else_keeps_its_name(becomes: Callable[..., None]) -> None:
    becomes(
        """
        try:
            from torch.ao.quantization import QConfig
        except ImportError:
            QConfig = None
        if QConfig is not None:
            QConfig(1, 2)
        """,
        """
        try:
            from backquant import QConfig
        except ImportError:
            QConfig = None
        if QConfig is not None:
            QConfig(1, 2)
        """,
    )


@pytest.mark.parametrize(
    "code",
    [
        "from .torch.ao.quantization import QConfig\n",
        "from torch.ao.pruning import WeightNormSparsifier\n",
        "from torchao.quantization import quantize_\n",
        "from mytorch.ao.quantization import QConfig\n",
        "import torch\nfrom torch import nn, quantize_per_tensor  # quantization\n",
    ],
)
def test_other_imports_stay(becomes: Callable[..., None], code: str) -> None:
    becomes(code, code)
