"""How long each node of a graph module takes, as it runs when it is replayed.

The calls of a recording belong to the nodes that made them. The calls of one node are a program by
themselves, which runs on the very tensors that the node reads in the whole, so that what kernels pass on to
each other (quantized tensors) costs nothing here as there. Of nodes that do the same to tensors of the same
layouts one is measured.

What cannot be recorded is measured node by node, as it runs without a recording. So is, where asked for, what
takes long: beside calls of tenths of a millisecond what a recording saves between them is nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_flatten

from backquant.graph import get_module
from backquant.runtime.replay.program import Program
from backquant.runtime.replay.record import (
    Arguments,
    Call,
    NotReplayable,
    Recording,
    Ref,
    known_constants,
    record,
)
from backquant.runtime.replay.shortened import shortened
from backquant.runtime.replay.threads import alone

# How long a call takes.

Clock = Callable[[Callable[[], object]], float]

_SHORT = 5e-5  # seconds that one round of timing takes at least
_ROUNDS = (
    (1e-3, 4),
    (2e-2, 1),
    (0.1, 1),
    (math.inf, 0),
)  # (seconds, rounds): a call that takes less than so long is repeated in so many rounds


def stopwatch(run: Callable[[], object], counter: Callable[[], float] | None = None) -> float:
    """Seconds of one call of ``run``: the fastest of a few rounds, of which each is long enough to measure; a
    call of more than a tenth of a second is one already.

    CPU time of this thread where torch uses no other, so that what else the machine does counts the least; or
    what ``counter`` counts.

    >>> 0 <= stopwatch(int) < 1
    True
    """
    usual = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    clock = usual if counter is None else counter
    start = clock()
    run()
    once = max(clock() - start, 1e-7)
    count = max(1, int(_SHORT / once))
    best, rounds = once, next(rounds for limit, rounds in _ROUNDS if once < limit)
    for _ in range(rounds):
        start = clock()
        for _ in range(count):
            run()
        best = min(best, (clock() - start) / count)
    return best


def stopwatch_alone(run: Callable[[], object]) -> float:
    """As ``stopwatch``: CPU time of this thread, which does it by itself, however many torch may use. Where
    threads wait for each other, what else the machine does counts more than what is measured.

    >>> 0 <= stopwatch_alone(int) < 1
    True
    """
    return alone(partial(stopwatch, run))


_LONG = (
    0.1,
    1e-4,
)  # seconds of an interpreted run, in all and per node: recording gains nothing beyond both


def replayed(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> Callable[[], object]:
    """``function(x)`` without Python between its operators, as often as it is called.

    >>> replayed(torch.relu, torch.tensor([-1.0, 2.0]))()
    tensor([0., 2.])
    """
    _, recording = record(function, (x,), {}, list)
    if isinstance(recording, NotReplayable):
        return partial(function, x)
    return partial(Program(shortened(recording)), [x])


def nothing() -> Callable[[], object]:
    """What does nothing, and takes as long as to call a program takes: no part of what programs do.

    >>> nothing()()
    tensor([])
    """
    return _Run(Program(_NOTHING), [torch.zeros(0)])


class NodeTimes:
    """Seconds of each node of ``module`` on inputs, by name, and in ``sizes`` how many elements floating
    point results have. Nodes that call nothing have no time.

    Measures each time that ``measure`` is called, and keeps the least: ``by_kernel`` has it by what decides
    how long calls take. What ``known`` holds is not measured. ``packs``: the first call packs weights, which
    is no part of the times; a float graph need not be run for it. ``walks``: do not record the graph, but
    measure node by node; ``None``: if it takes long (``is_walked``), which a graph that packs shows.

    >>> from torch.fx import symbolic_trace
    >>> times = NodeTimes(symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), (torch.ones(4, 8),))
    >>> times.measure(lambda run: 2.0 if isinstance(run(), tuple) else 0.0)
    >>> times.seconds, times.sizes
    ({'_0': 2.0, '_1': 2.0}, {'input_1': 32, '_0': 32, '_1': 32})
    """

    def __init__(
        self,
        module: GraphModule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        known: Mapping[str, float] = MappingProxyType({}),
        *,
        packs: bool = True,
        walks: bool | None = False,
    ) -> None:
        self.module = module
        self.known = known
        self.by_kernel: dict[str, float] = {}
        self.args = _positional(module, args, kwargs or {})
        self.seconds: dict[str, float] = {}
        self.refused = ""
        walk = _Walk(module)
        with torch.no_grad():
            self.is_walked = bool(walks)
            # the first run packs weights and checks kernels: time the second
            for again in (False, True) if packs else ():
                start = time.thread_time()
                walk.run(*self.args)
                if walks is not None or not _is_long(module, time.thread_time() - start):
                    break
                self.is_walked = again
        self.sizes = walk.sizes
        self._parts: list[_Part] = []
        if not self.is_walked:
            self._record(walk)

    def _record(self, walk: _Walk) -> None:
        module, constants = self.module, partial(known_constants, self.module)
        with torch.no_grad():
            _, recording = record(walk.run, self.args, {}, constants, walk.origin)
        try:
            if isinstance(recording, NotReplayable):
                raise recording
            self._recording = shortened(recording)
            self._parts = list(_parts(self._recording, module))
        except (NotReplayable, RuntimeError, AttributeError) as problem:
            self.refused = str(problem)

    def measure(self, clock: Clock = stopwatch) -> None:
        """Run everything once, each distinct node as often as ``clock`` wants."""
        with torch.no_grad():
            if self.is_walked or self.refused:
                timed = _Timed(self.module, clock, self._note)
                timed.run(*self.args)
                self.sizes |= timed.sizes
            else:
                self._measure_parts(clock)

    def _measure_parts(self, clock: Clock) -> None:
        given = Arguments(self.args, {}, takes_objects=True).tensors
        held = dict(zip(self._recording.inputs, given, strict=True))
        known = dict(self.known)
        called = clock(nothing())
        found: dict[str, float] = {}
        for part in self._parts:
            run = _Run(part.program, [held[name] for name in part.inputs])
            if part.key not in known:
                seconds = max(0.0, clock(run) - called)
                known[part.key] = seconds
                self.by_kernel[part.key] = min(seconds, self.by_kernel.get(part.key, seconds))
            found[part.node] = found.get(part.node, 0.0) + known[part.key]
            held.update(zip(part.outputs, run.result or run(), strict=True))
            for name in part.dropped:
                held.pop(name, None)
        for node, seconds in found.items():
            self._note(node, seconds)

    def _note(self, node: str, seconds: float) -> None:
        self.seconds[node] = min(seconds, self.seconds.get(node, seconds))


class _Run:
    """A program with its inputs and its last result, so that what was timed need not run once more."""

    def __init__(self, program: Program, tensors: list[torch.Tensor]) -> None:
        self.func, self._tensors = program, tensors
        self.result: Any = None

    def __call__(self) -> Any:
        self.result = self.func(self._tensors)
        return self.result


_NOTHING = Recording(("%0",), result=Ref("%0"))


def _positional(
    module: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    module.recompile()  # a deferred graph module has no signature before
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return (*bound.args, *bound.kwargs.values())


class _Walk(Interpreter):
    """Runs a graph module, and keeps the node that is running."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.node = ""
        self.sizes: dict[str, int] = {}

    def origin(self) -> str:
        return self.node

    def run_node(self, n: Node) -> Any:
        self.node = n.name
        result = super().run_node(n)
        is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
        if is_float and n.op != "output":
            self.sizes[n.name] = result.numel()
        return result


class _Timed(_Walk):
    """Runs a graph module and measures its calls: of those that do the same to tensors of the same layouts
    one."""

    def __init__(
        self, module: GraphModule, clock: Clock, note: Callable[[str, float], None]
    ) -> None:
        super().__init__(module)
        self.clock, self.note = clock, note
        self._shapes = _Shapes(module)
        self._known: dict[Hashable, float] = {}
        self._nothing = clock(_Call(partial(Interpreter.run_node, self), _idle()))

    def run_node(self, n: Node) -> Any:
        if not n.op.startswith("call_"):
            return super().run_node(n)
        key, call = self._key(n), _Call(super().run_node, n)
        if key not in self._known:
            self._known[key] = max(0.0, self.clock(call) - self._nothing)
        self.note(n.name, self._known[key])
        return call() if call.result is None else call.result

    def _key(self, n: Node) -> Hashable:
        arguments = tree_flatten(self.fetch_args_kwargs_from_env(n))[0]
        called = self._shapes.of(n.name) or (n.target,)
        return n.op, called, tuple(map(_layout, arguments))


class _Call:
    """A call of a node, and its last result."""

    def __init__(self, run: Callable[[Node], Any], node: Node) -> None:
        self.func, self._node = run, node
        self.result: Any = None

    def __call__(self) -> Any:
        self.result = self.func(self._node)
        return self.result


def _idle() -> Node:
    """A node whose call takes no time."""
    return Graph().call_function(_forget, (0,))


def _forget(_: Any) -> None:
    return None


def _layout(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return tuple(value.shape), strides, value.dtype
    return "number" if isinstance(value, float) else str(value)


def _is_long(module: GraphModule, seconds: float) -> bool:
    calls = sum(node.op.startswith("call_") for node in module.graph.nodes)
    return bool(seconds > max(_LONG[0], _LONG[1] * calls))


class _Part:
    """The calls of one node: a program of the tensors ``inputs``, which gives ``outputs``."""

    def __init__(self, node: str, key: str, recording: Recording, dropped: list[str]) -> None:
        self.node, self.key, self.dropped = node, key, dropped
        self.inputs = recording.inputs
        self.outputs = [ref.name for ref in recording.result]
        self.program = Program(recording)


def _parts(recording: Recording, module: GraphModule) -> Iterator[_Part]:
    groups = [(node, list(calls)) for node, calls in groupby(recording.calls, lambda c: c.origin)]
    last: dict[str, int] = {}
    for place, (_, calls) in enumerate(groups):
        for name in _read(calls):
            last[name] = place
    for ref in tree_flatten(recording.result)[0]:
        if isinstance(ref, Ref):
            last[ref.name] = len(groups)
    shapes = _Shapes(module)
    for place, (node, calls) in enumerate(groups):
        made = {name for call in calls for name in _made(call)}
        read = dict.fromkeys(_read(calls))
        constants = {n: recording.constants[n] for n in read if n in recording.constants}
        inputs = tuple(n for n in read if n not in made and n not in constants)
        outputs = [n for n in made if last.get(n, -1) > place] or [*inputs[:1], *sorted(made)[:1]][
            :1
        ]
        if not outputs:
            continue
        result = tuple(Ref(name) for name in outputs)
        own = Recording(inputs, calls, constants, recording.layouts, result)
        key = _digest(_key(calls, recording), shapes.of(node))
        dropped = [n for n in (*inputs, *outputs) if last.get(n, -1) <= place]
        yield _Part(node, key, own, dropped)


def _made(call: Call) -> Iterator[str]:
    for output in call.outputs:
        if isinstance(output, tuple):
            yield from output
        elif output is not None:
            yield output


def _read(calls: Iterable[Call]) -> Iterator[str]:
    for call in calls:
        for leaf in tree_flatten(call.arguments)[0]:
            if isinstance(leaf, Ref):
                yield leaf.name


def _digest(*what: Hashable) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


def _key(calls: list[Call], recording: Recording) -> Hashable:
    """What decides how long ``calls`` take: operators, layouts, and numbers that are no scales."""
    rows: list[Hashable] = []
    for call in calls:
        leaves = [_plain(leaf, recording) for leaf in tree_flatten(call.arguments)[0]]
        results = [_shape(name, recording) for name in _made(call)]
        rows.append((str(call.operator), tuple(leaves), tuple(results)))
    return tuple(rows)


def _plain(leaf: Any, recording: Recording) -> Hashable:
    if isinstance(leaf, Ref):
        return _shape(leaf.name, recording)
    return (
        "number" if isinstance(leaf, float) else str(type(leaf)) if _is_packed(leaf) else str(leaf)
    )


def _shape(name: str, recording: Recording) -> Hashable:
    layout = recording.layouts[name]
    return layout.size, layout.stride


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, torch.ScriptObject)


class _Shapes:
    """The shapes of the tensors of the module that a node calls: packed weights show none."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._nodes = {node.name: node for node in module.graph.nodes}

    def of(self, node: str) -> Hashable:
        found = self._nodes.get(node)
        if found is None or found.op != "call_module":
            return ()
        called: nn.Module = get_module(self._module, str(found.target))
        tensors = (*called.parameters(), *called.buffers())
        return type(called).__name__, tuple(tensor.shape for tensor in tensors)
