"""The operators that a graph in a file may call: a table of names.

A name stands for the function of torch, ``torch.nn.functional``, ``torch.linalg``, ``torch.fft`` or
``torch.special``, the method of tensors and the ``aten`` operator that are called so. What is here checks its
arguments when it is called: sizes, strides and indices that lead out of a tensor's memory are an error. What
can show or write other memory is left out, whatever its arguments are:

1. views by numbers alone: ``as_strided``, ``_reshape_alias``, ``set_``, ``resize_``, storage and pointers;
2. memory that nobody has written: ``empty`` and its kind;
3. operators whose checks are in their callers, or missing: ``_unsafe_index``, ``native_batch_norm``, whole
   LSTMs, ``fractional_max_pool2d``, packed weights, sparse tensors;
4. results written into an argument (``out=``), files, callbacks, other devices' handles.

In-place forms are admitted for what computes element by element. Some operators of this table are safe for
some arguments only; ``backquant.artifact.operators`` checks those.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import SymInt
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from backquant.artifact import kernels
from backquant.artifact.growth import RESIZES, check_call_growth, check_numbers, check_sizes
from backquant.errors import ArtifactError
from backquant.operators import overload

_words = re.compile(r"\w+").findall
_PREFIX = re.compile(r"^(special|linalg|fft)_")
_POINTWISE = _words("""
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip conj conj_physical copysign
cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1 expit fix floor
floor_divide fmod frac ge gelu glu greater greater_equal gt hardshrink hardsigmoid hardswish
hardtanh heaviside hypot i0 isfinite isinf isnan isneginf isposinf isreal ldexp leaky_relu lerp less
less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not
logical_or logical_xor logit logsigmoid lt le masked_fill maximum minimum mish mul multiply
nan_to_num ne neg negative nextafter not_equal positive pow prelu rad2deg real imag reciprocal relu
relu6 remainder round rrelu rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus
softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc where
xlogy __and__ __or__ __xor__ __lshift__ __rshift__ fmax fmin float_power polar complex gcd lcm entr
erfcx i0e i1 i1e log_ndtr ndtr ndtri polygamma psi xlog1py frexp dropout dropout1d dropout2d
dropout3d alpha_dropout feature_alpha_dropout feature_dropout native_dropout
fake_quantize_per_tensor_affine
""")
_REDUCTIONS = _words("""
all amax amin aminmax any argmax argmin argsort argwhere count_nonzero cummax cummin cumprod cumsum
cumulative_trapezoid diff dist kthvalue logcumsumexp logsumexp max mean median min mode msort
nanmean nanmedian nansum nonzero norm prod quantile nanquantile renorm sort std std_mean sum topk
trapezoid trapz unique _unique2 unique_dim unique_consecutive var var_mean vector_norm matrix_norm
softmax log_softmax
softmin gumbel_softmax _softmax _log_softmax _safe_softmax normalize cosine_similarity
pairwise_distance cdist pdist histc bucketize
""")
_SHAPES = _words("""
adjoint alias as_tensor atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to
cat channel_shuffle chunk clone column_stack combinations concat concatenate contiguous copy detach
detach_copy diag diag_embed diagflat diagonal diagonal_copy alias_copy expand_copy searchsorted
diagonal_scatter dsplit dstack expand expand_as fill flatten flip fliplr flipud full full_like
gather hsplit hstack index index_add index_copy index_fill index_put index_select kron lift_fresh
lift_fresh_copy masked_scatter masked_select matrix_H mH mT meshgrid moveaxis movedim narrow
narrow_copy numpy_T unfold_copy unsafe_chunk unsafe_split unsafe_split_with_sizes sum_to_size
native_channel_shuffle new_full new_ones new_tensor new_zeros one_hot ones ones_like pad
constant_pad_nd permute permute_copy pixel_shuffle pixel_unshuffle ravel reflection_pad1d
reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
replication_pad3d reshape reshape_as resolve_conj resolve_neg roll rot90 row_stack scatter
scatter_add scatter_reduce select select_copy select_scatter slice slice_copy slice_scatter split
split_copy split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack swapaxes swapdims t
t_copy take take_along_dim tensor tensor_split tile trace transpose transpose_copy tril tril_indices
triu triu_indices unbind unbind_copy unflatten unfold unsqueeze unsqueeze_copy vander view view_as
view_as_complex view_as_real view_copy vsplit vstack zero zeros zeros_like arange linspace logspace eye
scalar_tensor cartesian_prod _unsafe_view _to_copy _reshape_copy _conj fold im2col col2im
affine_grid affine_grid_generator grid_sample grid_sampler grid_sampler_2d grid_sampler_3d
interpolate upsample upsample_nearest upsample_bilinear hann_window hamming_window bartlett_window
blackman_window kaiser_window upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
_upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
""")
_PRODUCTS = _words("""
addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d conv_transpose1d
conv_transpose2d conv_transpose3d conv_tbc convolution cov corrcoef cross det dot einsum embedding
embedding_bag ger inner inv inverse linear matmul matrix_exp matrix_power mm multi_dot mv outer
scaled_dot_product_attention multi_head_attention_forward slogdet tensordot vdot vecdot
lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
""")
_LAYERS = _words("""
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d
batch_norm group_norm instance_norm layer_norm native_layer_norm native_group_norm
local_response_norm lp_pool1d lp_pool2d lp_pool3d max_pool1d max_pool2d max_pool3d
max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
max_unpool1d max_unpool2d max_unpool3d rms_norm _fused_rms_norm fft fft2 fftn fftshift fftfreq
rfftfreq hfft ifft ifft2 ifftn ifftshift ihfft irfft irfft2 irfftn rfft rfft2 rfftn stft istft
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy
gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss
multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss nll_loss_nd nll_loss2d
cross_entropy_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
feature_alpha_dropout bernoulli multinomial normal rand rand_like randint randint_like randn
randn_like randperm uniform exponential normal_functional log_normal cauchy geometric random
""")
_NUMBERS = _words("""
can_cast finfo iinfo is_complex is_floating_point is_nonzero is_same_size is_signed is_tensor
isclose isin allclose numel promote_types result_type equal broadcast_shapes sym_size sym_numel
_assert _assert_async _assert_scalar _assert_tensor_metadata _local_scalar_dense item sym_not
sym_max sym_min sym_int sym_float sym_ite sym_constrain_range_for_size sym_constrain_range
is_grad_enabled is_inference_mode_enabled get_default_dtype unravel_index sym_sum sym_sqrt
""")
_QUANTIZED = _words(
    "dequantize quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic int_repr"
)
_FUNCTIONS = frozenset(
    [*_POINTWISE, *_REDUCTIONS, *_SHAPES, *_PRODUCTS, *_LAYERS, *_NUMBERS, *_QUANTIZED]
)

# In place: what computes element by element, and writes at checked positions.
_IN_PLACE = frozenset(
    f"{name}_"
    for name in [
        *_POINTWISE,
        *_words("copy fill zero cumsum cumprod index_add index_copy index_fill index_put"),
        *_words("masked_scatter scatter scatter_add scatter_reduce clamp tril triu renorm"),
        *_words("bernoulli normal uniform random exponential log_normal cauchy geometric"),
        "fill_diagonal",
    ]
    if not name.startswith("_")
)
_METHODS_ONLY = frozenset(
    _words("""
bfloat16 bool byte cdouble cfloat char cpu cuda data dim dim_order double element_size float
get_device half int is_contiguous is_conj is_neg is_inference is_set_to long ndimension nelement
new_full new_ones new_tensor new_zeros q_per_channel_axis q_per_channel_scales
q_per_channel_zero_points q_scale q_zero_point qscheme requires_grad_ short size storage_offset
stride sum_to_size to tolist type type_as unfold zero_ numel __add__ __and__ __floordiv__ __lshift__
__matmul__ __mod__ __mul__ __or__ __pow__ __rshift__ __sub__ __truediv__ __xor__ __radd__ __rand__
__rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rsub__
__rtruediv__ __rxor__ __iadd__ __iand__ __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__ __ipow__
__irshift__ __isub__ __itruediv__ __ixor__ __abs__ __contains__ __eq__ __ge__ __getitem__ __gt__
__invert__ __le__ __len__ __lt__ __ne__ __neg__ __pos__ __setitem__ get items keys values copy
""")
)
_OPERATORS_ONLY = frozenset(_words("sym_size to type_as lift slice size new_full contiguous"))


def is_function(name: str) -> bool:
    """Whether a graph may call the function of torch of this name.

    >>> is_function("add"), is_function("relu_"), is_function("as_strided"), is_function("empty")
    (True, True, False, False)
    """
    return name in _FUNCTIONS or name in _IN_PLACE


def is_method(name: str) -> bool:
    """Whether a graph may call this method of tensors (or, reading, of dicts and lists).

    >>> is_method("view"), is_method("__getitem__"), is_method("resize_"), is_method("data_ptr")
    (True, True, False, False)
    """
    return is_function(name) or name in _METHODS_ONLY


def is_admitted(name: str, overload: str = "") -> bool:
    """Whether a graph may call ``torch.ops.aten.<name>[.<overload>]``.

    >>> is_admitted("add", "Tensor"), is_admitted("add", "out"), is_admitted("set_", "source_Tensor")
    (True, False, False)
    """
    writes = overload == "out" or overload.endswith("_out") or "generator" in overload
    return not writes and (is_function(_PREFIX.sub("", name)) or name in _OPERATORS_ONLY)


# Calls of operators that are safe for some arguments only; see ``backquant.artifact.operators``.
#
# A node of a graph that comes from a file is checked when it is read:
#
# 1. No call writes its result into an argument (``out=``), calls back (``key=``), or brings a generator.
# 2. The windows of convolutions and pooling are literals between 0 and 65,536: larger ones wrap around in
#    the operators' arithmetic.
# 3. ``repeat_interleave`` repeats by a literal, or a number made of sizes: with a tensor of repeats the
#    operator writes where they add up to. ``tril_indices`` and ``triu_indices`` take literals below 65,536.
# 4. ``upsample_*`` of ``aten`` take scales that are literals between 1/65,536 and 65,536, ``interpolate``
#    factors that make no more positions of one than a layer does (``backquant.artifact.growth``).
# 5. Integers are divided with truncation by literals above 0 (the smallest by -1 is a trap of the processor).
# 6. Dtypes, layouts and memory formats are those of torch: an operator takes any integer for one, and reading
#    the name of one that does not exist ends the process.
# 7. Sizes that are written out ask for at most 67 million positions (``backquant.artifact.growth``).
# 8. Arguments of our own kernels: ``backquant.artifact.kernels`` and ``kernel_tensors``.

_NEVER = frozenset({"out", "key", "generator"})
_LARGEST = 1 << 16
_ENUMERATED = ("ScalarType", "Layout", "MemoryFormat")
_CONVOLUTION = re.compile(r"conv\d|conv_t|conv_tbc|convolution$")
_WINDOWED = re.compile(r"pool\d?d?|unpool|^unfold$|^fold$|im2col|col2im")
_UPSAMPLE = re.compile(r"^_?upsample_\w+\d")

# How many arguments of a windowed operator are tensors, or sizes that the operator checks.
_SIZED = {"fold": 2, "col2im": 2, "unfold": 1, "im2col": 1}


def check_call(path: str, target: Callable[..., Any], args: Any, kwargs: Any, where: str) -> None:
    """A ``call_function`` of what ``path`` names. Raises ``ArtifactError`` for arguments that are not safe.

    >>> import torch
    >>> check_call("torch.repeat_interleave", torch.repeat_interleave, (None, 3), {}, "node r")
    >>> check_call("torch.add", torch.add, (1, 2), {"out": None}, "node add")
    >>> check_call("torch.add", torch.add, (1, 2), {"out": 3}, "node add")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: add may not be called with out=
      where  node add
    """
    parts = path.split(".")
    name = parts[3] if path.startswith("torch.ops.") and len(parts) > 3 else parts[-1]
    if path in kernels.FUNCTIONS:
        kernels.check_arguments(target, args, kwargs, where)
        return
    if isinstance(target, OpOverload | OpOverloadPacket):
        _check_enumerated(name, target, args, kwargs, where)
    if parts[0] in ("builtins", "operator"):
        check_numbers(name, args, where)
    if parts[0] == "builtins" and name in ("min", "max"):
        _refuse_keywords(name, kwargs, where)
    if parts[0] == "torch":
        is_view = path.startswith("torch.ops.aten.unfold.")  # that of tensors, not of images
        _check(name, args, kwargs, where, is_method=is_view)


def _check_enumerated(name: str, target: Any, args: Any, kwargs: Any, where: str) -> None:
    """Rule 6."""
    for place in _enumerated(target):
        given = kwargs.get(place) if isinstance(place, str) else dict(enumerate(args)).get(place)
        if isinstance(given, int | float | Node | SymInt):
            raise ArtifactError(
                f"{name} may not be called with {given} where it takes a dtype, a layout or a memory format",
                where=where,
                fix='{"dtype": "int8"}, and so on, as backquant.save writes them',
            )


@lru_cache(maxsize=1024)
def _enumerated(target: OpOverload | OpOverloadPacket) -> frozenset[int | str]:
    """The positions and names of arguments that torch numbers."""
    return frozenset(_places(target))


def _places(target: OpOverload | OpOverloadPacket) -> Iterator[int | str]:
    found: list[Any] = [target]
    if isinstance(target, OpOverloadPacket):
        found = [getattr(target, name) for name in target.overloads()]
    for schema in (each._schema for each in found):
        for position, argument in enumerate(schema.arguments):
            if any(kind in str(argument.real_type) for kind in _ENUMERATED):
                yield argument.name
                if not argument.kwarg_only:
                    yield position


def check_method_call(name: str, args: Any, kwargs: Any, where: str) -> None:
    """``check_call`` for a ``call_method``; the first argument is the object of the method."""
    _check(name, args, kwargs, where, is_method=True)


def _refuse_keywords(name: str, kwargs: Any, where: str) -> None:
    refused = sorted(key for key in _NEVER & set(kwargs) if kwargs[key] is not None)
    if refused:
        raise ArtifactError(f"{name} may not be called with {refused[0]}=", where=where)


def _check(name: str, args: Any, kwargs: Any, where: str, *, is_method: bool) -> None:
    _refuse_keywords(name, kwargs, where)
    check_sizes(name, args, kwargs, where)
    wrong = ""
    if _CONVOLUTION.search(name):
        wrong = _windows(args[3:], kwargs, {"input", "weight", "bias"})
        if not wrong:
            check_call_growth(name, args, kwargs, where)
    elif _WINDOWED.search(name) and not (name == "unfold" and is_method):
        known = _SIZED.get(name, 2 if "unpool" in name or "adaptive" in name else 1)
        wrong = _windows(args[known:], kwargs, {"input", "indices", "output_size", "self"})
    elif name == "repeat_interleave":
        repeats = [*args[1:2], kwargs.get("repeats", 0)]
        wrong = _literals([r for r in repeats if not is_size(r)], 0, "repeats")
        wrong = wrong or ("" if len(args) > 1 or "repeats" in kwargs else "a tensor of repeats")
    elif name in ("tril_indices", "triu_indices"):
        wrong = _literals([*args, *(kwargs.get(key, 0) for key in ("row", "col"))], 0, "sizes")
    elif _UPSAMPLE.search(name):
        wrong = _scales(args[1:], kwargs)
    elif name in RESIZES:
        check_call_growth(name, args, kwargs, where)
    elif name in ("div", "divide", "div_", "divide_"):
        wrong = _division(args, kwargs)
    if wrong:
        raise ArtifactError(
            f"{name} may not be called with {wrong[:120]}",
            where=where,
            fix="numbers that are written in the model, and of the size that layers have",
        )


def _windows(args: Any, kwargs: Any, tensors: set[str]) -> str:
    named = {key: value for key, value in kwargs.items() if key not in tensors}
    return _literals([*args, *named.values()], 0, "a window")


def _literals(values: Any, low: int, what: str) -> str:
    for value in values:
        if isinstance(value, (list, tuple)):
            if wrong := _literals(value, low, what):
                return wrong
        elif isinstance(value, Node):
            return f"{what} that is computed ({value})"
        elif type(value) is int and not low <= value <= _LARGEST:
            return f"{value}"
    return ""


def _scales(args: Any, kwargs: Any) -> str:
    scales = [kwargs[key] for key in kwargs if "scale" in key]
    for value in (*args, *scales):
        found = value if isinstance(value, (list, tuple)) else [value]
        wrong = [v for v in found if type(v) is float and not 1 / _LARGEST <= v <= _LARGEST]
        if wrong:
            return f"the scale {wrong[0]}"
    computed = [v for v in (*args[2:], *scales) if isinstance(v, Node)]
    return "a scale that is computed" if computed else ""


def _division(args: Any, kwargs: Any) -> str:
    mode = kwargs.get("rounding_mode", args[2] if len(args) > 2 else None)
    if mode in (None, "floor"):
        return ""
    other = kwargs.get("other", args[1] if len(args) > 1 else None)
    return "" if type(other) in (int, float) and other > 0 else f"truncation and {other!r}"


# Numbers that a graph makes of sizes of tensors, and of nothing else: no tensor is among them.
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
_MOST = 64  # nodes that are looked at for one number


def is_size(value: Any) -> bool:
    """Whether a value of a graph is a node for an integer that is made of sizes.

    >>> from torch.fx import symbolic_trace
    >>> graph = symbolic_trace(lambda x, y: x.repeat(x.shape[0] // y.size(0), y.shape[1] * y)).graph
    >>> [repeat] = graph.find_nodes(op="call_method", target="repeat")
    >>> [is_size(arg) for arg in repeat.args]
    [False, True, False]
    """
    if not isinstance(value, Node):
        return False
    seen, pending = {value}, [value]
    while pending and len(seen) <= _MOST:
        node = pending.pop()
        if _reads_size(node):
            continue
        numbers = all(type(arg) is int or isinstance(arg, Node) for arg in node.args)
        if node.op != "call_function" or node.target not in _ARITHMETIC or not numbers:
            return False
        pending += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    return not pending


def _reads_size(node: Node) -> bool:
    """One size of a tensor."""
    if node.kwargs or len(node.args) != 2:
        return False
    source, place = node.args
    if not isinstance(source, Node) or type(place) is not int:
        return False
    if node.op == "call_method":
        return node.target == "size"
    if node.target is operator.getitem:
        is_shape = source.target is getattr and source.args[1:] == ("shape",)
        return is_shape or (source.target == "size" and len(source.args) == 1)
    return node.op == "call_function" and node.target is overload("sym_size")
