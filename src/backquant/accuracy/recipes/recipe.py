"""Recipes: which steps, in which order, as data that can be shared; and following one, step by step."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, fx, nn

from backquant.accuracy.figures import decibel_text, decibels
from backquant.accuracy.recipes.bench import ENOUGH_SAMPLES, Bench, Read
from backquant.accuracy.recipes.draft import (
    Change,
    Draft,
    Layer,
    Together,
    input_of,
    layers_of,
    tables_of,
)
from backquant.accuracy.recipes.ranges import ranges
from backquant.accuracy.recipes.reconstruction import blocks, distillation
from backquant.accuracy.recipes.rescale import awq, equalization, products, smoothquant
from backquant.accuracy.rounding import (
    adaround,
    better_rows,
    clipped,
    columns,
    descended,
    gptq,
    mean_error,
)
from backquant.accuracy.twin import Twin, Walk
from backquant.calibrate.group import ALONE, Ranks, by_rank_0, in_turn
from backquant.errors import UsageError, did_you_mean
from backquant.graph.edit import weighted_part

__all__ = ["STEPS", "Step"]


# The steps of recipes. Each proposes changes to a draft; those that lower the error of the outputs are kept.
#
# No step needs labels. Weights are judged on the inputs that their layer has in the quantized model. In a
# process group, the ranks divide the layers among themselves; in GPTQ, where one waits for the layers before
# it, all ranks do all.


# Layers whose outputs get back, channel by channel, the mean or the variance that they have in the float
# model.
_MOST = 2.0  # by how much a channel is scaled
_BYTES = 256 << 20  # of values that wait, in float and quantized
_FEWEST = 4  # batches, of any size


def bias_correction(draft: Draft, bench: Bench) -> Iterator[Change]:
    """Subtract the mean error of each output channel from the bias, layer by layer in the order of the graph,
    so that each layer reads the results of layers that are corrected already.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019
    (arXiv 1906.04721), appendix D, the empirical form.
    """
    for layer, wanted, found in _moments(draft, bench):
        yield _moved(layer, wanted, found)


def batch_norm(draft: Draft, bench: Bench) -> Iterator[Change]:
    """Give each output channel the mean and the variance that it has in the float model, as a batch norm
    behind the layer would whose statistics are those of the quantized model, folded into weight and bias.

    Integers of weights that have a scale for each channel stay what they are; others are rounded anew. A
    channel is scaled by a half to 2; those of transposed convolutions, which have one scale as a rule, get
    the mean alone. Source: Sun et al., "Hybrid 8-bit Floating Point (HFP8) Training and Inference for Deep
    Neural Networks", 2019 (statistics of batch norms are tuned anew for inference).
    """
    for layer, wanted, found in _moments(draft, bench):
        if layer.transposed:
            yield _moved(layer, wanted, found)
            continue
        ratio = (wanted.variance / found.variance.clamp(min=1e-30)).sqrt().clamp(1 / _MOST, _MOST)
        ratio = torch.where(wanted.variance > 0, ratio, torch.ones_like(ratio))
        bias = wanted.mean - ratio * (found.mean - _bias(layer).double())
        yield _scaled(layer, ratio.float(), bias.float())


def _moved(layer: Layer, wanted: _Moments, found: _Moments) -> Change:
    bias = _bias(layer) + (wanted.mean - found.mean).float()
    _set_bias(layer, bias)
    return Change(layer.path, bias=bias)


def _scaled(layer: Layer, ratio: Tensor, bias: Tensor) -> Change:
    own, qparams = layer.reference, layer.qparams()
    spread = ratio.reshape(-1, *[1] * (layer.weight.dim() - 1))
    weight = own.dequantized_weight() * spread  # as steps before rounded it
    _set_bias(layer, bias)
    scale = qparams["scale"]
    if scale.dim() == 1 and scale.numel() == ratio.numel() and qparams["axis"] == 0:
        qparams["scale"] = own.weight_scale = scale * ratio
    elif scale.dim() > 1:
        qparams["scale"] = own.weight_scale = scale * spread
    return Change(layer.path, weight=weight, qparams=qparams, bias=bias)


def _bias(layer: Layer) -> Tensor:
    bias = layer.reference.bias
    return torch.zeros((), device=layer.weight.device) if bias is None else bias.detach()


def _set_bias(layer: Layer, bias: Tensor) -> None:
    layer.reference.register_parameter("bias", nn.Parameter(bias, requires_grad=False))


@dataclass(frozen=True)
class _Moments:
    """The moments of each output channel, over all batches and positions."""

    mean: Tensor
    variance: Tensor


def _moments(draft: Draft, bench: Bench) -> Iterator[tuple[Layer, _Moments, _Moments]]:
    """Each layer that is called once, with its results in the float model and in the quantized one: in the
    order of the graph, so that what is done to a layer counts for those behind it.

    Walks over all batches wait at each layer for the others. Of batches that would take much memory so, some
    are taken."""
    twin = draft.twin()
    layers = {layer.nodes[0].name: layer for layer in layers_of(twin, transposed=True)}
    layers = {name: layer for name, layer in layers.items() if len(layer.nodes) == 1}
    batches = _spread(bench, twin, list(layers.values()))
    in_float = list(bench.walks(twin, lambda _: False, batches))
    quantized = list(bench.walks(twin, lambda _: True, batches))
    for node in twin.nodes:
        layer = layers.get(node.name)
        if layer is not None:
            wanted = _summed(layer, layer.float_part, node, in_float)
            yield layer, wanted, _summed(layer, layer.reference, node, quantized)


def _spread(bench: Bench, twin: Twin, layers: Sequence[Layer]) -> list[Any]:
    """As many of the batches as are in memory at once, evenly spread; what waits is measured on the first."""
    batches, waiting = bench.fitting, 0
    for walk in bench.walks(twin, lambda _: True, batches[:1]):
        for layer in sorted(layers, key=lambda layer: twin.place[layer.nodes[0].name]):
            walk.to(twin.place[layer.nodes[0].name])
            input_of(walk, layer.nodes[0])
            waiting = max(waiting, walk.held_bytes())
    count = max(_FEWEST, _BYTES // max(1, 2 * waiting))
    step = max(1.0, len(batches) / count)
    return [batches[int(index * step)] for index in range(min(count, len(batches)))]


def _summed(layer: Layer, module: Any, node: fx.Node, walks: Sequence[Walk]) -> _Moments:
    axis = -1 if isinstance(layer.float_part, nn.Linear) else 1
    sums: Any = 0.0
    squares: Any = 0.0
    count = 0
    for walk in walks:
        walk.to(walk.twin.place[node.name])
        values = module(input_of(walk, node)).movedim(axis, 0).unsqueeze(-1).flatten(1)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        variance, mean = torch.var_mean(values, 1, correction=0)
        sums = sums + mean.double() * values.shape[1]
        squares = squares + (variance.double() + mean.double().square()) * values.shape[1]
        count += values.shape[1]
    mean = sums / max(count, 1)
    return _Moments(mean, (squares / max(count, 1) - mean.square()).clamp(min=0))


#: From a draft and the data to the changes that it proposes.
Step = Callable[[Draft, Bench], Iterable[Change | Together]]
_SUMS_AT_ONCE = 1 << 28  # bytes of gram matrices in memory


def weight_clipping(draft: Draft, bench: Bench) -> Iterator[Change]:
    """Smaller scales for weights, where clipping the largest weights costs less than the finer steps gain, by
    the error of the layer's output; of embeddings by the error of their rows. See ``rounding.clipped``.
    """
    yield from _by_layer(draft, bench, _clipped)
    yield from _clipped_tables(draft, bench)


def _clipped_tables(draft: Draft, bench: Bench) -> Iterator[Change]:
    tables = list(tables_of(draft.twin()))[bench.ranks.rank :: bench.ranks.size]
    own = [_clipped(table, None) for table in tables]
    yield from filter(None, in_turn(bench.ranks, "clipping embeddings", own))


def _clipped(layer: Layer, hessian: Tensor | None) -> Change | None:
    scale = layer.reference.weight_scale
    share = _share(layer, hessian)
    if scale.numel() == 1:
        factor = share.min().reshape(scale.shape)
    elif scale.numel() == share.numel():
        factor = share.reshape(scale.shape)
    elif scale.shape[0] == share.numel():
        factor = share.reshape(-1, *[1] * (scale.dim() - 1))
    else:
        return None
    if not bool((factor < 1).any()):
        return None
    return Change(layer.path, qparams={**layer.qparams(), "scale": scale * factor})


def _share(layer: Layer, hessian: Tensor | None) -> Tensor:
    """``clipped`` for each row, or for each group of a row where groups have scales of their own."""
    weight, grid = columns(layer.weight, layer.groups), layer.grid()
    scale: Tensor = layer.reference.weight_scale
    if scale.dim() != 2 or layer.weight.dim() != 2 or scale.shape[0] != weight.shape[1]:
        return clipped(weight, hessian, grid)
    width = weight.shape[-1] // scale.shape[1]
    found = []
    for start in range(0, weight.shape[-1], width):
        own = slice(start, start + width)
        part = replace(grid, scale=grid.scale[..., own], zero_point=grid.zero_point[..., own])
        among = None if hessian is None else hessian[:, own, own]
        found.append(clipped(weight[..., own], among, part))
    return torch.stack(found, -1)


def gptq_weights(draft: Draft, bench: Bench) -> Iterator[Change]:
    """Weights rounded by GPTQ; see ``rounding.gptq``. Rows with which rounding to nearest has the smaller
    error are rounded to nearest. In the order of the graph: a layer reads what the layers before it give as
    they are rounded by then. All ranks do the same.
    """
    return _rounded_in_order(draft, bench, _by_gptq)


def clipped_gptq(draft: Draft, bench: Bench) -> Iterator[Change]:
    """``weight_clipping`` and ``gptq_weights`` in one pass: the scales, too, are chosen by what a layer reads
    when the layers before it are rounded."""
    yield from _rounded_in_order(draft, bench, _by_clipped_gptq)
    yield from _clipped_tables(draft, bench)


def _rounded_in_order(
    draft: Draft, bench: Bench, rounded: Callable[[Layer, Tensor], Change]
) -> Iterator[Change]:
    corrected = _corrected(draft)
    for layer, read in _in_order(draft, bench):
        change = rounded(layer, read.gram)
        if layer.path in corrected:
            change = _with_bias(layer, change, read.means)
            assert change.bias is not None
            _set_bias(layer, change.bias)
        layer.reference._store_weight(change.weight, change.qparams)
        bench.ranks.alive()
        yield change


def _by_gptq(layer: Layer, hessian: Tensor) -> Change:
    weight, grid = columns(layer.weight, layer.groups), layer.grid()
    made = gptq(weight, hessian, grid)
    return _rounding(layer, better_rows(weight, hessian, grid.nearest(weight), made))


def _by_clipped_gptq(layer: Layer, hessian: Tensor) -> Change:
    narrow = _clipped(layer, hessian)
    if narrow is not None and narrow.qparams is not None:
        layer.reference.weight_scale = narrow.qparams["scale"]
    return _by_gptq(layer, hessian)


def adaround_weights(draft: Draft, bench: Bench) -> Iterator[Change]:
    """Weights rounded by AdaRound or, row by row, by GPTQ with single weights turned, whichever loses less;
    see ``rounding``."""
    return _by_layer(draft, bench, _by_adaround)


def _by_adaround(layer: Layer, hessian: Tensor) -> Change:
    weight, grid = columns(layer.weight, layer.groups), layer.grid()
    turned = descended(weight, hessian, grid, gptq(weight, hessian, grid), most=64)
    best = better_rows(weight, hessian, grid.nearest(weight), turned)
    return _rounding(layer, better_rows(weight, hessian, best, adaround(weight, hessian, grid)))


def _rounding(layer: Layer, made: Tensor) -> Change:
    return Change(layer.path, weight=made.reshape(layer.weight.shape), qparams=layer.qparams())


def _by_layer(
    draft: Draft, bench: Bench, changed: Callable[[Layer, Tensor], Change | None]
) -> Iterator[Change]:
    """What becomes of each layer: rank r of n sees to every n-th from r on. A bias that was corrected for
    other integers is wrong for the new ones: it takes back the mean error of these instead."""
    corrected = _corrected(draft)
    own = []
    for layer, read in _judged(draft, bench):
        change = changed(layer, read.gram)
        if change is not None and layer.path in corrected:
            change = _with_bias(layer, change, read.means)
        own.append(change)
        bench.ranks.alive()
    every = in_turn(bench.ranks, "rounding weights", own)
    return (change for change in every if change is not None)


def _corrected(draft: Draft) -> set[str]:
    """The layers whose bias was corrected."""
    return {place for place, one in draft.changes.items() if one.bias is not None}


def _with_bias(layer: Layer, change: Change, means: Tensor) -> Change:
    made = change.weight
    if made is None:
        rounded = copy.deepcopy(layer.reference)
        rounded._store_weight(layer.weight, change.qparams)
        made = rounded.dequantized_weight()
    error = mean_error(made - layer.weight, means, layer.groups)
    bias = torch.zeros_like(error) if layer.float_part.bias is None else layer.float_part.bias
    return replace(change, bias=(bias.detach() - error).to(layer.weight.dtype))


def _in_order(draft: Draft, bench: Bench) -> Iterator[tuple[Layer, Read]]:
    """Each layer, in the order of the graph, with what it reads in a model whose layers before it are as they
    were left. Walks over the batches wait at each layer for the others; see ``_spread``."""
    twin, most = draft.twin(), bench.most_inputs
    original = dict(draft.prepared.named_modules())
    every = [each for each in layers_of(twin) if most is None or each.inputs <= most]
    readers = {node.name: layer for layer in every for node in layer.nodes}
    batches = _spread(bench, twin, every)
    reads = {layer.path: Read.over(layer, len(batches)) for layer in every}
    walks = list(bench.walks(twin, lambda _: True, batches))
    for position, node in enumerate(twin.nodes):
        layer = readers.get(node.name)
        if layer is None:
            continue
        for walk in walks:
            walk.to(position)
            reads[layer.path].add(layer, input_of(walk, node))
        if node is layer.nodes[-1]:
            own = replace(layer, float_part=weighted_part(original[layer.path]))
            yield own, reads.pop(layer.path).mean()


def _judged(draft: Draft, bench: Bench) -> Iterator[tuple[Layer, Read]]:
    """Each layer of this rank with what it reads in the quantized model.

    The matrices of as many layers as fit are summed in one pass over the data. Weights are those of the float
    model: what was rounded before is rounded anew.
    """
    twin = draft.twin()
    original = dict(draft.prepared.named_modules())
    most, held = bench.most_inputs, bench.reads.of(draft)
    every = [each for each in layers_of(twin) if most is None or each.inputs <= most]
    waiting = every[bench.ranks.rank :: bench.ranks.size]
    while waiting:
        now: list[Layer] = []
        size = 0
        while waiting and (not now or size < _SUMS_AT_ONCE):
            now.append(waiting.pop(0))
            size += 0 if now[-1].path in held else 4 * now[-1].groups * now[-1].inputs ** 2
        found = _read(bench, twin, [layer for layer in now if layer.path not in held])
        for layer in now:
            read = held[layer.path] if layer.path in held else found.pop(layer.path)
            bench.reads.hold(layer.path, read)
            yield replace(layer, float_part=weighted_part(original[layer.path])), read


def _read(bench: Bench, twin: Twin, layers: list[Layer]) -> dict[str, Read]:
    readers = {node.name: layer for layer in layers for node in layer.nodes}
    last = max((twin.place[name] for name in readers), default=-1)
    found = {layer.path: Read.over(layer, len(bench.fitting)) for layer in layers}
    with torch.no_grad():
        for walk in bench.walks(twin, lambda _: True) if layers else ():
            for position, node in enumerate(twin.nodes[: last + 1]):
                layer = readers.get(node.name)
                if layer is not None:
                    walk.to(position)
                    found[layer.path].add(layer, input_of(walk, node))
    return {path: read.mean() for path, read in found.items()}


#: By the words that recipes use.
STEPS: dict[str, Step] = {
    "equalization": equalization,
    "smoothquant": smoothquant,
    "products": products,
    "awq": awq,
    "ranges": ranges,
    "weight-clipping": weight_clipping,
    "gptq": gptq_weights,
    "clipped-gptq": clipped_gptq,
    "adaround": adaround_weights,
    "blocks": blocks,
    "distillation": distillation,
    "batch-norm": batch_norm,
    "bias-correction": bias_correction,
}

#: Those that add operators, or biases where a layer has none.
ADDING = frozenset(("products", "batch-norm", "bias-correction"))
_FIELDS = {"name", "steps", "most_inputs", "samples", "biases", "sample_decibels"}
BUILT_IN = ("default", "none", "better", "best")


@dataclass(frozen=True)
class Recipe:
    """A name, and the steps in order.

    ``most_inputs``: of an output of a layer whose weights are rounded or clipped; wider layers, of which that
    costs the cube, are left as they are. ``None``: no limit. ``samples``: how many of the data steps fit and
    judge on; more where they are small. ``biases``: whether biases are corrected by what
    is seen while the model is calibrated, where that costs little. ``sample_decibels``: layers of which the
    quietest samples have less over the noise of rounding are scaled sample by sample; ``None``: as without.

    >>> Recipe("mine", ("ranges", "bias-correction")).to_dict()
    {'name': 'mine', 'steps': ['ranges', 'bias-correction']}
    """

    name: str
    steps: tuple[str, ...] = ()
    most_inputs: int | None = None
    samples: int = ENOUGH_SAMPLES
    biases: bool = False
    sample_decibels: float | None = None

    def on_weights(self) -> Recipe:
        """Without what adds operators or biases, which checkpoints have no place for.

        >>> recipe_of("better").on_weights().steps
        ('weight-clipping', 'gptq')
        """
        steps = tuple(step for step in self.steps if step not in ADDING)
        return replace(self, steps=steps, biases=False, sample_decibels=None)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as a file holds it."""
        limit = {} if self.most_inputs is None else {"most_inputs": self.most_inputs}
        part = {} if self.samples == ENOUGH_SAMPLES else {"samples": self.samples}
        biases = {"biases": True} if self.biases else {}
        least = self.sample_decibels
        ranges = {} if least is None else {"sample_decibels": least}
        return {"name": self.name, "steps": list(self.steps), **limit, **part, **biases, **ranges}


def recipe_of(given: Recipe | str | os.PathLike[str] | Sequence[str]) -> Recipe:
    """A built-in recipe by name, one in a YAML file, a list of steps, or a recipe as it is.

    Raises ``UsageError`` for an unknown name, an unknown step, or a file that holds no recipe.

    >>> recipe_of("default").steps, recipe_of(["gptq"]).name
    ((), 'gptq')
    """
    if isinstance(given, Recipe):
        return given
    if not isinstance(given, str | os.PathLike):
        if not isinstance(given, Sequence) or not all(isinstance(step, str) for step in given):
            raise _refused(f"{type(given).__name__} is no recipe", f"recipe={given!r}")
        return _checked(Recipe(", ".join(given), tuple(given)), f"recipe={list(given)!r}")
    name = os.fspath(given)
    if name in BUILT_IN:
        text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        return _parse(text, name)
    if not Path(name).is_file():
        raise _refused(
            f"there is no recipe {name!r}",
            f"recipe={name!r}",
            did_you_mean(name, BUILT_IN, _KNOWN),
        )
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refused("the file is no recipe", f"recipe={name!r}") from error
    return _parse(text, name)


def _parse(text: str, where: str) -> Recipe:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _refused("the file is no recipe", where) from error
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise _refused("the file is no recipe", where)
    steps, most, biases = data.get("steps"), data.get("most_inputs"), data.get("biases", False)
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise _refused("the file is no recipe", where)
    if unknown := sorted(set(map(str, data)) - _FIELDS):
        raise _refused(f"a recipe has no {unknown[0]!r}", where)
    if most is not None and (type(most) is not int or most < 1):
        raise _refused(f"most_inputs is {most!r}", where, "most_inputs: 4096")
    samples = data.get("samples", ENOUGH_SAMPLES)
    if type(samples) is not int or samples < 1:
        raise _refused(f"samples is {samples!r}", where, f"samples: {ENOUGH_SAMPLES}")
    if type(biases) is not bool:
        raise _refused(f"biases is {biases!r}", where, "biases: true")
    least = data.get("sample_decibels")
    if least is not None and (type(least) not in (int, float) or not 0 <= least < math.inf):
        raise _refused(f"sample_decibels is {least!r}", where, "sample_decibels: 33")
    return _checked(Recipe(data["name"], tuple(steps), most, samples, biases, least), where)


def _checked(recipe: Recipe, where: str) -> Recipe:
    for step in recipe.steps:
        if step not in STEPS:
            known = ", ".join(STEPS)
            fix = did_you_mean(step, STEPS, f"one of {known}")
            raise _refused(f"there is no step {step!r}", where, fix)
    return recipe


_KNOWN = 'recipe="better", recipe=["ranges", "bias-correction"], or a YAML file: {name: mine, steps: [gptq]}'


def _refused(what: str, where: str, fix: str = _KNOWN) -> UsageError:
    return UsageError(what, where=where, fix=fix)


@dataclass(frozen=True)
class StepResult:
    """What one step gained: SQNR of the outputs in dB on all batches, and how many of the changes that it
    proposed were kept.

    >>> print(StepResult("gptq", 21.0, 24.5, 8, 9, 1.5))
    gptq: 21.0 dB → 24.5 dB, 8 of 9 changes kept
    """

    step: str
    before: float
    after: float
    kept: int
    proposed: int
    seconds: float

    def __str__(self) -> str:
        kept = f"{self.kept} of {self.proposed} changes kept"
        return f"{self.step}: {decibel_text(self.before)} → {decibel_text(self.after)}, {kept}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def followed(
    recipe: Recipe,
    draft: Draft,
    batches: Iterable[Any],
    told: Callable[[int, int | None], None] | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Draft, tuple[StepResult, ...]]:
    """``draft`` with the changes that ``recipe`` finds, and what each step gained. ``told`` is called after
    each step.

    All ``ranks`` hold the same draft and batches of their own; all of them follow the proposals of rank 0.

    Raises ``CalibrationError`` and ``InputError`` as calibration does.
    """
    draft = draft.settled()
    bench = Bench(draft, batches, ranks, recipe.most_inputs, recipe.samples)
    losses, results, steps = bench.losses(draft), [], _steps_for(recipe, draft)
    for position, name in enumerate(steps):
        before, start = losses.total, time.monotonic()
        with torch.no_grad():
            own = list(STEPS[name](draft, bench))
        make: Callable[[], list[Change | Together]] = partial(list, own)
        changes = by_rank_0(ranks, f"following {name}", make)
        draft, losses, kept = bench.kept(draft, changes, losses)
        seconds = round(time.monotonic() - start, 2)
        results.append(
            StepResult(name, decibels(before), decibels(losses.total), kept, len(changes), seconds)
        )
        if told is not None:
            told(position + 1, len(steps))
    return draft, tuple(results)


def _steps_for(recipe: Recipe, draft: Draft) -> tuple[str, ...]:
    """Where only weights are quantized, clipping and then GPTQ are one step, one pass over the data."""
    steps: list[str] = []
    for step in recipe.steps:
        if step == "gptq" and steps[-1:] == ["weight-clipping"] and draft.only_weights:
            steps[-1] = "clipped-gptq"
        else:
            steps.append(step)
    return tuple(steps)
