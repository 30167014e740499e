"""The dtypes that values are quantized to: one table, their ranges and schemes, and the arithmetic."""

from backquant.dtypes.arithmetic import (
    Rounding,
    dequantize_tensor,
    quantize_tensor,
    round_to,
)
from backquant.dtypes.granularity import Granularity, Undivided, block_of
from backquant.dtypes.interpolation import between_entries, interpolated_table
from backquant.dtypes.measured_range import (
    QuantRange,
    affine_qparams,
    array_qparams,
    resolve_range,
)
from backquant.dtypes.packing import (
    bits_of_values,
    pack_integers,
    stored_bytes,
    unpack_integers,
)
from backquant.dtypes.qdtype import Format, QDType
from backquant.dtypes.qparams import ObservedQParams, QParams, TensorQParams
from backquant.dtypes.requantization import (
    Requantization,
    quantize_multiplier,
    requantize_sums,
    shift_of,
)
from backquant.dtypes.scheme import (
    decode_schemes,
    encode_schemes,
    is_per_channel,
    is_per_tensor,
    is_symmetric,
)
from backquant.dtypes.stored_scales import stored_scale
from backquant.dtypes.table import (
    dtype_name,
    find_dtype,
    integer_range,
    is_narrow_float,
    is_quantized,
    is_scaled_float,
    known_dtypes,
    plain_dtype,
    qdtype,
    quantize_bounds,
    register_dtype,
    storage_dtype,
    tensor_token,
)

__all__ = [
    "Format",
    "Granularity",
    "ObservedQParams",
    "QParams",
    "QDType",
    "QuantRange",
    "Requantization",
    "Rounding",
    "TensorQParams",
    "Undivided",
    "affine_qparams",
    "array_qparams",
    "between_entries",
    "bits_of_values",
    "block_of",
    "decode_schemes",
    "dequantize_tensor",
    "dtype_name",
    "encode_schemes",
    "find_dtype",
    "integer_range",
    "interpolated_table",
    "is_narrow_float",
    "is_per_channel",
    "is_per_tensor",
    "is_quantized",
    "is_scaled_float",
    "is_symmetric",
    "known_dtypes",
    "pack_integers",
    "plain_dtype",
    "qdtype",
    "quantize_tensor",
    "quantize_bounds",
    "register_dtype",
    "quantize_multiplier",
    "requantize_sums",
    "shift_of",
    "resolve_range",
    "round_to",
    "storage_dtype",
    "stored_scale",
    "stored_bytes",
    "tensor_token",
    "unpack_integers",
]
