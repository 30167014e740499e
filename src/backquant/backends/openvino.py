"""openvino: OpenVINO's CPU plugin, by way of an ONNX file or its own IR with FakeQuantize semantics.

It runs the same form as ONNX Runtime: unsigned activations, signed weights folded to integers. Values
that depend on no input are not quantized: an addition of a quantized constant fails to compile. In float
(bfloat16 where the CPU has it) stay transposed convolutions, softmax, sigmoid, norms and embeddings.

Measured on OpenVINO 2026.4: float weights behind quantize nodes make the convolutions run in bfloat16;
unsigned weights, too.
"""

from __future__ import annotations

from backquant.backend_config import BackendConfig, LeaveFloat, QDQRules
from backquant.backends.defaults import CONVOLUTIONS
from backquant.backends.deployed import (
    ADDITIONS,
    DEPLOYED_DEFAULTS,
    FLOAT_OUTPUTS,
    MATMULS,
    MOVES,
    POOLS,
    PRODUCTS,
    STATIC,
    VALUES,
    WEIGHT_ONLY,
)
from backquant.operators import clamped, conv, elementwise, linear, shape
from backquant.operators.entry import admit, observed

__all__ = ["backend_config"]

BETWEEN = (*ADDITIONS, *PRODUCTS, *shape.CAT, *POOLS, *MOVES)


def backend_config() -> BackendConfig:
    """What OpenVINO's CPU plugin computes on integers.

    >>> config = backend_config()
    >>> config.name, config.qdq.quantize_constants
    ('openvino', False)
    """
    rules = QDQRules(
        quantize_constants=False,
        leave_float=(
            LeaveFloat((*FLOAT_OUTPUTS, *CONVOLUTIONS), results=True),
            LeaveFloat(BETWEEN, beside_float=True),
        ),
    )
    return (
        BackendConfig("openvino")
        .set_defaults(DEPLOYED_DEFAULTS)
        .set_qdq(rules)
        .set_backend_pattern_configs(
            [
                *(e for d in (1, 2, 3) for e in admit(conv.conv_entries(conv.CONV[d]), [STATIC])),
                *linear.entries([STATIC, WEIGHT_ONLY]),
                *clamped.entries([STATIC]),
                *elementwise.binary_entries([VALUES], (*ADDITIONS, *PRODUCTS)),
                *admit([observed(product) for product in MATMULS], [VALUES]),
                *shape.cat_entries([VALUES], shape.CAT),
                *shape.sharing_entries([VALUES], (*POOLS, *MOVES)),
                *shape.tensor_info_entries([VALUES]),
            ]
        )
    )
