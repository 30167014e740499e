"""The description ``onnxruntime`` beside ONNX Runtime's own list of kernels, both ways.

    python -m tools.onnxruntime_registry

A kernel's definition names the types that it takes. Listed are static claims (dtypes of activation and
weight) that no kernel of the CPU provider takes, and 8-bit types that a kernel takes and the description does
not claim. A kernel that exists need not be the one that the optimizer chooses: `backquant conform
onnxruntime` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tools.registry_claims import claims, print_both_ways

_TYPES = {torch.quint8: "tensor(uint8)", torch.qint8: "tensor(int8)"}
_PRODUCT, _SAME, _ANY = ("T1", "T2"), ("T",), ()
#: By operator: the kernel, and its constraints on the activation and on the weight.
KERNELS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{f"conv{n}d": ("QLinearConv", _PRODUCT) for n in (1, 2, 3)},
    "linear": ("QGemm", ("TA", "TB")),
    "matmul": ("QLinearMatMul", _PRODUCT),
    "add": ("QLinearAdd", _SAME),
    "mul": ("QLinearMul", _SAME),
    "sigmoid": ("QLinearSigmoid", _SAME),
    "softmax": ("QLinearSoftmax", _SAME),
    "leaky_relu": ("QLinearLeakyRelu", _SAME),
    "cat": ("QLinearConcat", _ANY),
    **{f"avg_pool{n}d": ("QLinearAveragePool", _ANY) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": ("QLinearGlobalAveragePool", _ANY) for n in (1, 2, 3)},
    **{f"max_pool{n}d": ("MaxPool", _SAME) for n in (1, 2, 3)},
    **dict.fromkeys(("relu", "relu6", "hardtanh"), ("Clip", _SAME)),
    "pixel_shuffle": ("DepthToSpace", _SAME),
}

Types = tuple[str, ...]


def registered() -> dict[str, list[dict[str, Any]]]:
    """The type constraints of each definition of the CPU provider, by operator."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    found: dict[str, list[dict[str, Any]]] = {}
    for kernel in get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider":
            found.setdefault(kernel.op_name, []).append(dict(kernel.type_constraints))
    return found


def claimed() -> dict[str, set[Types]]:
    """The dtypes of activation and weight that the description claims statically, by operator."""
    found: dict[str, set[Types]] = {}
    for operator, config in claims("onnxruntime"):
        dtypes = (config.input_dtype, config.weight_dtype)
        types = tuple(_TYPES[dtype] for dtype in dtypes if dtype in _TYPES)
        if types and config.input_dtype in _TYPES and not config.is_dynamic:
            found.setdefault(operator.name, set()).add(types)
    return found


def taken(kernel: str, constraints: tuple[str, ...]) -> set[Types]:
    """The 8-bit types that the definitions of ``kernel`` take together, in the order of ``constraints``."""
    found: set[Types] = set()
    for definition in registered().get(kernel, []):
        rows: set[Types] = {()}
        for name in constraints:
            types = set(definition.get(name, ())) & set(_TYPES.values())
            rows = {(*row, each) for row in rows for each in types}
        found |= rows
    return found


def _fitted(row: Types, constraints: tuple[str, ...]) -> Types:
    """The types that the constraints are on: without a weight, both operands are activations."""
    return (*row, *row)[: len(constraints)]


def beyond_the_registry() -> Iterator[str]:
    """Claims of operators that compute, which no definition takes."""
    for name, types in sorted(claimed().items()):
        kernel, constraints = KERNELS.get(name, ("", _ANY))
        if not kernel:
            continue
        have = taken(kernel, constraints)
        for row in sorted(types):
            if _fitted(row, constraints) not in have:
                yield f"{name}: {', '.join(row)}: no {kernel} takes it"


def unclaimed() -> Iterator[str]:
    """What definitions take and the description does not claim."""
    claimed_types = claimed()
    for name, (kernel, constraints) in KERNELS.items():
        have = {_fitted(row, constraints) for row in claimed_types.get(name, set())}
        for row in sorted(taken(kernel, constraints) - have):
            yield f"{name}: {kernel} takes {', '.join(row) or 'any'}"
    known = {kernel for kernel, _ in KERNELS.values()}
    for kernel in sorted(registered()):
        if kernel.startswith("QLinear") and kernel not in known:
            yield f"{kernel}: no entry"


def main() -> None:
    print_both_ways(beyond_the_registry(), unclaimed(), "a definition of a kernel")


if __name__ == "__main__":
    main()
