"""The library of kernels: found, checked, and registered with PyTorch, once in a process.

It is looked for in the folder that ``$BACKQUANT_KERNELS`` names, in this package (``libraries/``: compiled at
installation), and among those that ``backquant.native.build_kernels()`` has compiled on this machine.
``$BACKQUANT_KERNELS=off`` turns it off. A library is used only if

1. it was compiled from the sources of this version, and its file is undamaged,

2. the CPU has the instructions that it was built for, and ``ONEDNN_MAX_CPU_ISA`` does not forbid them (the
   fastest such library is taken),

3. PyTorch has the functions of its stable C interface that the library calls, and

4. its kernels compute right results on this CPU (``check``).

Otherwise models run on PyTorch's own kernels, and ``missing`` says why.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from backquant.native.build import build, is_whole, sources_digest
from backquant.native.instructions import InstructionSet, limit_said, usable
from backquant.native.packing import Layout
from backquant.native.plan import Result, Shape, magic, plan

#: Those whose kernels may be the library's.
ENGINES = ("x86", "onednn")
VARIABLE = "BACKQUANT_KERNELS"
_OFF = ("off", "0", "no", "false")
INSTALLED = Path(__file__).parent / "libraries"
_NAMESPACE = "backquant_kernels"
_NEEDED = "the kernels need Linux and a CPU with AVX2 at least, or an ARM one of 64 bits"
_OPERATORS = (
    *("convolution", "convolution_add", "linear", "averaged", "maxima", "gated", "rescaled"),
    *("quantized", "quantized_product", "quantized_planes", "looked_up", "shuffled"),
    *("joined", "joined_rescaled"),
    *("attention", "attention_biased", "attention_biased_twice"),
)
_lock = threading.RLock()
_found: list[str] = []  # why there is none; empty text: there is one
_held: list[Any] = []  # for as long as the process lives
_layouts: list[Layout] = []  # of the library that is held


def kernels_folder() -> Path:
    """Where ``backquant.native.build_kernels()`` puts the library."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "backquant" / "kernels"


def is_here() -> bool:
    """Whether the library runs in this process; the first call looks for it."""
    return not missing()


def missing() -> str:
    """Why the library does not run in this process; empty if it does."""
    if not _found:
        with _lock:
            if not _found:
                _found.append(_load())
    return _found[0]


def advice(engine: str) -> str:
    """One line on how models of ``engine`` would run faster here, where a library could run and does not."""
    if engine not in ENGINES or unusable() or not (reason := missing()):
        return ""
    return (
        f"backquant.native.build_kernels(): faster kernels than PyTorch's, which run now ({reason})"
    )


def layout() -> Layout:
    """How the library that runs in this process reads weights."""
    return _layouts[0]


def held() -> ctypes.CDLL:
    """The library that runs in this process."""
    library: ctypes.CDLL = _held[0]
    return library


def build_kernels() -> Path:
    """Compile the library for this machine; returns its path. It is used by new processes, and by this one if
    no quantized model has run in it yet.

    Raises ``EngineError`` without a compiler, and where no library can run.
    """
    from backquant.errors import EngineError, first_line

    sets = usable()
    if not sets:
        raise EngineError(
            f"the kernels cannot be used here: {_NEEDED}",
            where="backquant.native.build_kernels",
            fix="leave it out: models run on PyTorch's kernels",
        )
    try:
        return build(kernels_folder(), sets[0].name)
    except (FileNotFoundError, RuntimeError) as error:
        raise EngineError(
            f"the kernels cannot be built: {first_line(error)}",
            where="backquant.native.build_kernels",
            fix="apt-get install g++   # or CXX=/path/to/compiler",
        ) from error


def unusable() -> str:
    """Why no library can run here, whatever is installed; empty if one can."""
    if os.environ.get(VARIABLE, "").lower() in _OFF:
        return f"{VARIABLE} is {os.environ[VARIABLE]}"
    if not usable():
        limit = limit_said()
        return f"ONEDNN_MAX_CPU_ISA is {limit}" if limit and usable(limit="") else _NEEDED
    return ""


def _folders() -> Iterator[Path]:
    named = os.environ.get(VARIABLE)
    if named:
        yield Path(named)
    yield from (INSTALLED, kernels_folder())


def _load() -> str:
    reason = unusable()
    if reason:
        return reason
    reason = "the library is not installed; it needs g++"
    with torch.no_grad(), _disable_current_modes():  # no part of a recording
        for path, instructions in _libraries():
            reason = _start(path, instructions)
            if not reason:
                return ""
    return reason


def _libraries() -> Iterator[tuple[Path, InstructionSet]]:
    """The libraries that are here for this CPU, the fastest first."""
    for instructions in usable():
        for folder in _folders():
            for path in sorted(folder.glob(f"{sources_digest(instructions.name)}-*.so")):
                yield path, instructions


def _start(path: Path, instructions: InstructionSet) -> str:
    """Load the library at ``path``; returns what is wrong with it, or an empty text."""
    if _held:  # one library a process: what it registers stays
        return _checked(path)
    try:
        if not is_whole(path):
            return f"{path} is damaged: its bytes are not those that its name says"
        library = ctypes.CDLL(str(path))
        library.backquant_plan_layout.restype = ctypes.c_int64
        if library.backquant_plan_layout() != magic(instructions.layout):
            return f"{path} reads plans of another layout"
        library.backquant_register.restype = ctypes.c_char_p
        core = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        problem = library.backquant_register(str(core).encode())
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded: {error}"
    if problem:
        return f"{path}: torch {torch.__version__} has no {problem.decode()}"
    _held.extend([library, _without_gradients()])
    _layouts.append(instructions.layout)
    return _checked(path)


def _checked(path: Path) -> str:

    found = wrong(layout())
    return f"{path}: {found}" if found else ""


def _without_gradients() -> Any:
    """Tell autograd that the operators have no gradients."""
    autograd = torch.library.Library(_NAMESPACE, "IMPL", "Autograd")
    for name in _OPERATORS:
        autograd.impl(name, torch.library.fallthrough_kernel)
    return autograd


# Before the library is used, its kernels compute a few layers, which are compared with exact integer
# arithmetic.

_FLOAT = Result(1.0, 0, torch.float32, "none", (), "")
_RELU = Result(0.05, 3, torch.uint8, "relu", (), "")
_SWISH = Result(0.02, 11, torch.uint8, "swish", (), "")
_SIX = Result(0.04, 5, torch.uint8, "hardtanh", (0.0, 6.0), "")
_X = (0.02, 117)
_OTHER = (0.03, 90)

# of a step of the result: what is rounded to 16 bits, and an approximate exponential
_CLOSE_ATTENTION = 0.05
_CLOSE = 2e-3  # of a step of the result, and of the largest float, what the order of operations may decide


@dataclass(frozen=True)
class PlainWeights:
    """The weights of a layer. ``folded`` rounds well enough for a test, not as oneDNN does."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor

    def folded(self, x_scale: float, zero_point: int) -> torch.Tensor:
        """The bias that makes up for the zero point of the input."""
        sums = self.weight.flatten(1).sum(1, dtype=torch.int64)
        return (self.bias.double() - zero_point * sums * (self.scale.double() * x_scale)).float()


@dataclass(frozen=True)
class Case:
    """An image ``[batch, channels, height, width]`` and the layer that is computed on it."""

    image: tuple[int, int, int, int]
    shape: Shape
    result: Result
    adds: bool = False


def cases() -> Iterator[Case]:
    """A case for each kernel: with padding, with numbers of channels that do not fill a register, and with
    tiles that are not full.
    """
    point = Shape((72, 20, 1, 1))
    yield Case((1, 20, 5, 7), point, _FLOAT)
    yield Case((2, 20, 5, 7), point, _RELU, adds=True)
    yield Case((1, 20, 1, 1), Shape((40, 20, 1, 1)), _SWISH)
    yield Case((1, 3, 11, 12), Shape((24, 3, 3, 3), (2, 2), (1, 1)), _SIX)
    yield Case((1, 18, 6, 6), Shape((16, 18, 3, 3), (1, 1), (2, 2), (2, 2)), _FLOAT)
    yield Case((2, 3, 4, 9), Shape((8, 3, 1, 3)), _FLOAT)  # one row, read as one
    yield Case((2, 32, 6, 9), Shape((40, 32, 3, 3), (1, 1), (1, 1)), _RELU, adds=True)
    yield Case((1, 16, 9, 9), Shape((24, 16, 3, 3), (2, 2), (1, 1)), _FLOAT)
    for deep, groups in ((4, 5), (8, 5), (16, 2), (20, 2)):
        shape = Shape((deep * groups, deep, 3, 3), (deep // 16 + 1,) * 2, (1, 1), groups=groups)
        yield Case((2, deep * groups, 6, 9), shape, _RELU if deep > 4 else _FLOAT)
    for size, stride in ((3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (7, 2)):
        shape = Shape((70, 1, size, size), (stride, stride), (size // 2, size // 2), groups=70)
        yield Case((1, 70, 9, 8), shape, _SWISH if size == 5 else _FLOAT)


def wrong(layout: Layout) -> str:
    """Which cases a library with weights of ``layout`` computes wrongly on this CPU; empty if none."""
    generator = torch.Generator().manual_seed(0)
    for case in cases():
        found, expected = computed(case, generator, layout)
        off = (found.double() - expected).abs().max()
        limit = 0.5 + _CLOSE if case.result.dtype == torch.uint8 else _CLOSE * expected.abs().max()
        if not off <= limit:
            return f"its {case.shape} for {case.image} is wrong on this CPU, by {float(off):.3g}"
    return _wrong_image(generator) or _wrong_attention(generator)


def _wrong_image(generator: torch.Generator) -> str:
    """Which kernel for images is wrong: on channels that fill a register and some that do not."""
    size = (2, 150, 5, 7)
    for name, found, expected in image_results(size, generator):
        off = (found.double() - expected.clamp(0, 255)).abs().max()
        if not off <= 0.5 + _CLOSE:
            return f"its {name} for {size} is wrong on this CPU, by {float(off):.3g}"
    return ""


def _wrong_attention(generator: torch.Generator) -> str:
    """Which attention is wrong: on sizes that fill registers and some that do not."""
    for terms in range(3):
        found, expected = attention_result((2, 3, 11, 37, 20, 19), terms, generator)
        off = (found.double() - expected).abs().max()
        if not off <= 0.5 + _CLOSE_ATTENTION:
            return f"its attention with {terms} terms is wrong on this CPU, by {float(off):.3g}"
    return ""


def attention_result(
    size: tuple[int, int, int, int, int, int],
    terms: int,
    generator: torch.Generator,
    run: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's result, and the exact one before it is rounded, of attention with so many terms added.

    ``size``: batch, heads, queries, keys, channels of both, of the values. ``run``: see ``image_results``.
    """
    run = run or torch.ops.backquant_kernels
    batch, heads, queries, keys, deep, wide = size
    rows = ((queries, deep), (keys, deep), (keys, wide))
    q, k, v = (  # a head's channels side by side in a row of all heads
        torch.randn(batch, count, heads, channels, generator=generator).transpose(1, 2)
        for count, channels in rows
    )
    added = [
        torch.randn(1, heads, queries, keys, generator=generator),
        torch.randn(batch, 1, 1, keys, generator=generator),
    ][:terms]
    operators = (run.attention, run.attention_biased, run.attention_biased_twice)
    found = operators[terms](q, k, v, *added, deep**-0.5, 0.02, 120)
    scores = q.double() @ k.double().transpose(2, 3) * deep**-0.5
    scores = sum(added, scores)
    value = torch.softmax(scores, -1) @ v.double()
    return found, (value / 0.02 + 120).clamp(0, 255)


def image_results(
    size: tuple[int, int, int, int], generator: torch.Generator, run: Any = None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The name, the library's result and the exact one before it is rounded, of each kernel for images.

    ``run``: the library's operators, by default those of this process.
    """
    run = run or torch.ops.backquant_kernels
    x, gate = _integers(size, generator), _integers((*size[:2], 1, 1), generator)
    yield "average", run.averaged(x), x.double().mean((2, 3), keepdim=True)
    tall, wide = size[2] > 2, size[3] > 1
    window = ((3 if tall else 1, 2 if wide else 1), (2, 1), (1 if tall else 0, 1 if wide else 0))
    found = run.maxima(x, *window[0], *window[1], *window[2], True)
    yield "maxima", found, F.max_pool2d(x.double(), *window, ceil_mode=True)
    value = (x.double() - 120) * (gate.double() - 30) * 0.00713 + 55
    yield "gate", run.gated(x, gate, 120.0, 30.0, 0.00713, 55.0, 3), value.clamp(min=3)
    numbers = torch.randn(2, size[1] + 16, generator=generator)
    numbers[1] = numbers[1] * 50 + 100
    scale, shift = (each[: size[1]].double().view(-1, 1, 1) for each in numbers)
    found = run.rescaled(x, numbers.flatten(), 7)
    yield "rescale", found, (x.double() * scale + shift).clamp(min=7)
    floats = torch.randn(size, generator=generator).contiguous(memory_format=torch.channels_last)
    yield "quantize", run.quantized(floats, 0.0173, 101), floats.double() / 0.0173 + 101
    times = torch.randn((*size[:2], 1, 1), generator=generator)
    product = floats.double() * times.double() / 0.0173 + 101
    yield "quantize a product", run.quantized_product(floats, times, 0.0173, 101), product
    for planes in (floats[:, :3].contiguous(), floats.contiguous()):
        found = run.quantized_planes(planes, 0.0173, 101)
        yield "quantize planes", found, planes.double() / 0.0173 + 101
    table = torch.randperm(256, generator=generator).to(torch.uint8)
    half = (size[1] + 1) // 2
    left, right = x[:, :half], x[:, size[1] - half :]
    turns = torch.stack([left, right], 2).flatten(1, 2)
    yield "shuffle", run.shuffled(left, right), turns.double()
    parts = [left, right, x]
    yield "join", run.joined(parts), torch.cat(parts, 1).double()
    both = [part for part in (right, left[:, : size[1] - half]) if part.shape[1]]
    expected = torch.cat(both, 1).double() * scale + shift
    yield "join and rescale", run.joined_rescaled(both, numbers.flatten(), 7), expected.clamp(min=7)
    for some in (x, x[:, half - 1 :]):
        yield "look up", run.looked_up(some, table), table.double()[some.long()]


def computed(
    case: Case, generator: torch.Generator, layout: Layout, run: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's result on random integers, and the exact one before it is rounded.

    ``run``: the library's operators, by default those of this process.
    """
    run = run or torch.ops.backquant_kernels
    channels = case.shape.weight[0]
    x = _integers(case.image, generator)
    weight = torch.randint(-127, 128, case.shape.weight, dtype=torch.int8, generator=generator)
    scale = torch.rand(channels, generator=generator) * 2e-3 + 1e-3
    weights = PlainWeights(weight, scale, torch.randn(channels, generator=generator))
    steps = (case.shape.stride, case.shape.padding, case.shape.dilation, case.shape.groups)
    sums = F.conv2d(x.double() - _X[1], weight.double(), None, *steps)
    value = sums * (scale.double() * _X[0]).view(-1, 1, 1) + weights.bias.double().view(-1, 1, 1)
    if case.adds:
        other = _integers(tuple(value.shape), generator)
        value = value + (other.double() - _OTHER[1]) * _OTHER[0]
        made = plan(case.shape, weights, _X, case.result, _OTHER, layout)
        return run.convolution_add(x, other, made), _finished(value, case.result)
    found = run.convolution(x, plan(case.shape, weights, _X, case.result, layout=layout))
    return found, _finished(value, case.result)


def _integers(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    made = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return made.contiguous(memory_format=torch.channels_last)


def _finished(value: torch.Tensor, result: Result) -> torch.Tensor:
    if result.post_op == "relu":
        value = value.relu()
    elif result.post_op == "hardtanh":
        value = value.clamp(*result.numbers)
    elif result.post_op == "swish":
        value = F.silu(value)
    elif result.post_op == "gelu":
        value = F.gelu(value, approximate=result.algorithm)
    if result.dtype == torch.float32:
        return value
    return (value / result.scale + result.zero_point).clamp(0, 255)


# What observers measure, by the library: one look at each value. Without it numpy and PyTorch do.

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_NOT_FINITE = -1


def sampled(
    flat: Tensor, cut: Sequence[int], number: int
) -> tuple[float, float, Tensor, Tensor] | None:
    """The extremes of ``flat`` (float32 ``[n]``, on the CPU), its values of the tails, and every
    n-th value (float32 ``[number]``), NaN for those of the tails; None where a value is not finite.

    ``cut``: columns, how many values they hold, groups, those of the tail, n
    (``observe/histogram.py``). The library must be here (``is_here``).

    >>> if is_here():
    ...     low, high, _, _ = sampled(torch.arange(9000.0), (512, 8704, 512, 16, 7), 1286)
    ...     assert (low, high) == (0.0, 8999.0)
    """
    flat = flat.contiguous()
    bulk, large, ends = flat.new_empty(number), torch.empty_like(flat), (ctypes.c_float * 2)()
    found = _functions()[0](
        flat.data_ptr(), flat.numel(), (_LONG * 5)(*cut), bulk.data_ptr(), large.data_ptr(), ends
    )
    if found == _NOT_FINITE:
        return None
    return ends[0], ends[1], large[:found].clone(), bulk


def count(values: Tensor, times: int, bits: tuple[int, int], least: int, sums: Tensor) -> None:
    """Add ``values`` (float32 ``[k]``, on the CPU), each ``times``, to ``sums`` (int64 ``[n, 3]``,
    contiguous).

    ``bits``: of the mantissa in a key, and of a position in a bin; ``least``: the key of the second row of
    ``sums`` (``observe/histogram_grid.py``). The library must be here.
    """
    values = values.resolve_neg().contiguous()  # to be kept while it is read
    _functions()[1](
        values.data_ptr(), values.numel(), times, *bits, least, len(sums) - 2, sums.data_ptr()
    )


@cache
def _functions() -> tuple[Any, Any]:
    """Those of the library that runs in this process."""
    library = held()
    sample, counts = library.backquant_sample, library.backquant_count
    sample.argtypes, sample.restype = [_POINTER, _LONG, *[_POINTER] * 4], _LONG
    counts.argtypes = [_POINTER, _LONG, _LONG, _INT, _INT, _LONG, _LONG, _POINTER]
    counts.restype = None
    return sample, counts
