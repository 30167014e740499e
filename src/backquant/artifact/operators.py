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
some arguments only; ``backquant.artifact.bounded_calls`` checks those.
"""

from __future__ import annotations

import re

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
