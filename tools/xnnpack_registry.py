"""The description ``xnnpack`` beside the partitioner of ExecuTorch's XNNPACK delegate, both ways.

    python -m tools.xnnpack_registry

For each operator the partitioner has a configuration, which says whether it takes it in float, statically
quantized, or quantized at each call. What more it asks of a node (axes of a mean, groups, sizes) it checks in
code, which is not read here: `backquant conform xnnpack` runs it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from tools.registry_claims import claims, print_both_ways

from backquant.dtypes import is_quantized
from backquant.operators.operator import Operator

STATIC, DYNAMIC = "STATIC_QUANT", "DYNAMIC_QUANT"
#: What the edge dialect calls operators that exporting replaces.
_REPLACED = {
    "relu6": "hardtanh.default",
    "transpose": "permute_copy.default",
    "adaptive_avg_pool2d": "mean.dim",
    "grouped_linear": "linear.default",  # one for each group
    "flatten": "view_copy.default",
    "reshape": "view_copy.default",
    "squeeze": "view_copy.default",
}
#: Nothing is left of them in an exported graph.
_GONE = ("identity", "contiguous")


def registered() -> dict[str, set[str]]:
    """The ways in which each operator of the edge dialect is taken."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what ExecuTorch imports
        from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS

    found: dict[str, set[str]] = {}
    for config in ALL_PARTITIONER_CONFIGS:
        taken = config().supported_precision_types()
        found[config.target_name] = {precision.name for precision in taken}
    return found


def edge_names(operator: Operator) -> tuple[str, ...]:
    """What an operator may be in the edge dialect.

    >>> from torch import nn
    >>> from backquant.operators import find
    >>> edge_names(find(nn.Conv2d)), edge_names(find("permute"))
    (('convolution.default',), ('permute.default', 'permute_copy.default'))
    """
    if operator.family == "conv":
        return ("convolution.default",)
    if operator.name in _REPLACED:
        return (_REPLACED[operator.name],)
    names = [overload.__name__ for overload in operator.aten]
    return tuple(
        made
        for base, _, overload in (name.partition(".") for name in names)
        for made in (f"{base}.{overload}", f"{base}_copy.{overload}")
    )


def claimed() -> dict[str, tuple[Operator, set[str]]]:
    """By operator: the ways in which the description claims it."""
    found: dict[str, tuple[Operator, set[str]]] = {}
    for operator, config in claims("xnnpack"):
        if is_quantized(config.input_dtype):
            ways = found.setdefault(operator.name, (operator, set()))[1]
            ways.add(DYNAMIC if config.is_dynamic else STATIC)
    return found


def beyond_the_registry() -> Iterator[str]:
    """Claims that no configuration of the partitioner takes."""
    have = registered()
    for name, (operator, ways) in sorted(claimed().items()):
        if name in _GONE:
            continue
        names = edge_names(operator)
        taken = set().union(*(have.get(each, set()) for each in names))
        for way in sorted(ways - taken):
            yield f"{name}: {way}: not taken as {', '.join(names)}"


def unclaimed() -> Iterator[str]:
    """What the partitioner takes quantized, and the description does not claim."""
    reached: dict[str, set[str]] = {}
    for operator, ways in claimed().values():
        for name in edge_names(operator):
            reached.setdefault(name, set()).update(ways)
    for name, ways in sorted(registered().items()):
        for way in sorted((ways & {STATIC, DYNAMIC}) - reached.get(name, set())):
            yield f"{name}: {way}"


def main() -> None:
    print_both_ways(beyond_the_registry(), unclaimed(), "the partitioner")


if __name__ == "__main__":
    main()
