from __future__ import annotations

import builtins
import math
import operator
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backquant.artifact import functions
from backquant.artifact.functions import find_function, function_path
from backquant.artifact.labels import find_class
from backquant.errors import ArtifactError
from backquant.lower.kernels.boundary import quantize


def fx_spellings() -> Iterator[Any]:
    """What real graphs hold: operators in all their spellings."""
    yield from (operator.add, operator.getitem, operator.iadd, operator.matmul, operator.not_)
    yield from (getattr, len, min, max, math.sqrt, math.floor, abs, round)
    yield from (torch.add, torch.relu, torch.cat, torch.flatten, torch.matmul, torch.arange)
    yield from (torch.zeros, torch.full, torch.tensor, torch.einsum, torch.where, torch.topk)
    yield from (F.relu, F.conv2d, F.linear, F.max_pool2d, F.adaptive_avg_pool2d, F.interpolate)
    yield from (
        F.gelu,
        F.silu,
        F.hardswish,
        F.layer_norm,
        F.pad,
        F.softmax,
        F.dropout,
        F.grid_sample,
    )
    yield from (
        F.scaled_dot_product_attention,
        F.max_pool2d_with_indices,
        F.embedding,
        F.logsigmoid,
    )
    yield from (
        torch.conv2d,
        torch.nn.functional.conv_transpose2d,
        torch.fft.rfft,
        torch.special.erf,
    )
    yield from (torch.linalg.norm, torch._C._nn.gelu, torch.quantize_per_tensor, torch.dequantize)
    yield from (torch.ops.aten.relu.default, torch.ops.aten.add, torch.ops.aten.linalg_inv.default)
    yield from (quantize, torch._assert, torch.split)
    bindings = torch._C._VariableFunctions  # what a trace records of ``torch.meshgrid([x, y])``
    yield from (bindings.meshgrid, bindings.einsum, bindings.block_diag, bindings.cartesian_prod)


@pytest.mark.parametrize(
    "function", list(fx_spellings()), ids=lambda f: str(getattr(f, "__name__", f))
)
def test_a_function_of_tensors_is_found_again(function: Callable[..., Any]) -> None:
    assert find_function(function_path(function)) is function


# Their results point where random samples, targets or callbacks say, unchecked; or they are for GPUs alone.
LEFT_OUT = {
    "assert_int_or_pair",
    "ctc_loss",
    "fractional_max_pool2d",
    "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d",
    "fractional_max_pool3d_with_indices",
    "grouped_mm",
    "linear_cross_entropy",
    "scaled_addmm",
    "scaled_addmm_",
    "scaled_grouped_mm",
    "scaled_mm",
    "triplet_margin_with_distance_loss",
}


def test_every_other_public_function_of_torch_nn_functional_is_storable() -> None:
    own = [
        f for f in vars(F).values() if callable(f) and getattr(f, "__module__", "") == F.__name__
    ]
    public = [f for f in own if not f.__name__.startswith("_") and not isinstance(f, type)]
    assert len(public) > 80
    for function in public:
        if function.__name__ in LEFT_OUT:
            with pytest.raises(ArtifactError):
                function_path(function)
            continue
        assert find_function(function_path(function)) is function


REFUSED = [
    "torch._grouped_mm",
    "os.system",
    "posix.system",
    "subprocess.run",
    "builtins.eval",
    "builtins.exec",
    "builtins.open",
    "builtins.__import__",
    "builtins.setattr",
    "builtins.print",
    "operator.attrgetter",
    "operator.methodcaller",
    "operator.call",
    "operator.setitem.__call__",
    "math.os.system",
    "torch.os.system",
    "torch.sys.modules",
    "torch.load",
    "torch.save",
    "torch.serialization.load",
    "torch.hub.load",
    "torch.hub.load_state_dict_from_url",
    "torch.jit.load",
    "torch.compile",
    "torch.from_file",
    "torch.frombuffer",
    "torch.autocast",
    "torch.package.PackageImporter",
    "torch.utils.cpp_extension.load_inline",
    "torch.utils.data.DataLoader",
    "torch.distributed.init_process_group",
    "torch.classes.load_library",
    "torch.ops.load_library",
    "torch.ops.import_module",
    "torch.ops.aten.from_file",
    "torch.ops.aten.from_file.default",
    "torch.ops.aten.save",
    "torch.as_strided",
    "torch.empty",
    "torch.empty_like",
    "torch.resize_as_",
    "torch.native_batch_norm",
    "torch.lstm",
    "torch.mkldnn_rnn_layer",
    "torch.fbgemm_linear_fp16_weight",
    "torch.sparse_csr_tensor",
    "torch.ops.aten.as_strided.default",
    "torch.ops.aten._reshape_alias.default",
    "torch.ops.aten.set_.source_Tensor_storage_offset",
    "torch.ops.aten.resize_.default",
    "torch.ops.aten._unsafe_index.Tensor",
    "torch.ops.aten.empty.memory_format",
    "torch.ops.aten.add.out",
    "torch.ops.aten.native_batch_norm.default",
    "torch.ops.quantized.linear.default",
    "torch.ops.onednn.qlinear_pointwise.default",
    "torch.ops.prims.as_strided.default",
    "backquant.lower.kernels.views.integer_view",
    "backquant.lower.kernels.views.quantized_view",
    "backquant.lower.kernels.repacked.pack_linear",
    "math.factorial",
    "torch.ops.aten",
    "torch.ops.aten.relu.default.__call__",
    "torch.ops.c10d.send",
    "torch.ops.prim.RaiseException",
    "torch.ops.profiler._record_function_enter",
    "torch.nn.functional.torch.load",
    "torch.nn.functional.importlib.import_module",
    "torch._C._nn.__loader__",
    "torch._C.parse_ir",
    "torch._utils._import_dotted_name",
    "backquant.load",
    "backquant.artifact.store.read_model",
    "backquant.lower.kernels.views.warnings.warn",
    "backquant.lower.kernels.views._new_quantized",
    "backquant.lower.kernels.views.TypedStorage",
    "backquant.lower.kernels.nothing.here",
    "backquant.cli.models.import_object",
    "",
    "relu",
    "torch.",
]


@pytest.mark.parametrize("path", REFUSED)
def test_anything_else_is_refused_without_being_called(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{path} was called with {args} {kwargs}")

    for owner, name in ((os, "system"), (subprocess, "run"), (builtins, "eval"), (torch, "load")):
        monkeypatch.setattr(owner, name, never)
    with pytest.raises(ArtifactError):
        find_function(path)


def test_a_refused_path_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bq_evil.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for find in (find_function, find_class):
        with pytest.raises(ArtifactError):
            find("bq_evil.run")
        with pytest.raises(ArtifactError):
            find("torch.utils.bottleneck.__main__.main")
    assert "bq_evil" not in sys.modules and "torch.utils.bottleneck" not in sys.modules


def test_no_admitted_function_takes_a_path() -> None:
    from backquant.artifact.functions import _functions

    names = {path.rsplit(".", 1)[1] for path in _functions()}
    assert not names & {
        "load",
        "save",
        "open",
        "from_file",
        "system",
        "load_library",
        "compile",
        "eval",
    }
    for path, function in _functions().items():
        home = getattr(function, "__module__", None) or "torch"
        root = home.split(".")[0]
        assert root in ("torch", "_operator", "operator", "math", "builtins"), (path, home)


def test_what_a_module_merely_imports_is_not_its_own() -> None:
    with pytest.raises(ArtifactError, match="there is no function"):
        find_function("shutil.os.system", allow=("shutil",))
    with pytest.raises(ArtifactError):
        find_function("os.system", allow=("os",))  # defined in posix
    assert find_function("shutil.copy", allow=("shutil",)).__name__ == "copy"


def test_operators_of_a_package_that_is_allowed() -> None:
    library = torch.library.Library("bq_artifact_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    op = torch.ops.bq_artifact_test.twice.default
    with pytest.raises(ArtifactError):
        function_path(op)
    path = function_path(op, allow=("bq_artifact_test",))
    assert find_function(path, allow=("bq_artifact_test",)) is op


def test_messages(snapshot: Callable[..., None]) -> None:
    def local(x: torch.Tensor) -> torch.Tensor:
        return x

    for name, function in {"local": local, "lambda": lambda x: x, "module": nn.ReLU()}.items():
        with pytest.raises(ArtifactError) as caught:
            function_path(function)
        snapshot(f"function-{name}", caught.value, {local.__module__: "<module>"})
    for path in (
        "os.system",
        "torch.load",
        "mylib.act.swish",
        "torch.ops.mylib.op",
        "torch.ops.aten.relux",
        "torch.ops.aten.remainder.int",
        "torch.ops.quantized_decomposed.relux.default",
    ):
        with pytest.raises(ArtifactError) as caught:
            find_function(path)
        snapshot(f"find-{path}", caught.value)
    with pytest.raises(ArtifactError) as caught:
        find_function("backquant.lower.kernels.boundary.nothing")
    snapshot("find-kernel", caught.value)
    with pytest.raises(ArtifactError) as caught:
        find_function("pathlib.Nothing", allow=("pathlib",))
    snapshot("find-allowed", caught.value)


def test_a_package_that_fails_to_import_says_what_it_lacks(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, snapshot: Callable[..., None]
) -> None:
    (tmp_path / "bq_half_installed.py").write_text("import bq_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ArtifactError) as caught:
        find_function("bq_half_installed.act", allow=("bq_half_installed",))
    snapshot("find-half-installed", caught.value)


def test_functions_that_another_package_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_geometric puts its own in the place of ``torch.select``: saved is what torch defines."""
    native = torch.select

    def theirs(value: torch.Tensor, dim: int, index: int) -> torch.Tensor:
        return native(value, dim, index)

    theirs.__module__ = "another.package"
    monkeypatch.setattr(torch, "select", theirs)
    caches = (functions._all_torch_functions, functions._functions, functions._paths)
    for cached in caches:
        cached.cache_clear()
    try:
        assert function_path(native) == function_path(theirs) == "torch.select"
        assert find_function("torch.select") is native
        assert function_path(torch.einsum) == "torch.einsum"
    finally:
        for cached in caches:
            cached.cache_clear()


def _allowed(*_: object) -> None:
    """What is allowed by name is read."""
    assert find_function("pathlib.Path", allow=("pathlib",)) is pathlib.Path
    path = "torch.ops.aten.hypot.default"
    assert find_function(path, allow=(path,)) is torch.ops.aten.hypot.default


BY_HAND = {
    "express it with": lambda *_: function_path(torch.relu),
    "functions of operator": lambda *_: [find_function("operator.mod"), find_function("math.fmod")],
    'allow=("mylib",)': _allowed,
    'allow=("torch.ops.aten': _allowed,
}
