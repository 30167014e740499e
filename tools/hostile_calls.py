"""Every callable that a file may name, with hostile arguments, in forked processes.

    python tools/hostile_calls.py --draws 40 --seed 0
    python tools/hostile_calls.py --only builtins.range     # one callable

A call is a graph of one node, checked as a file's is and interpreted as one. Arguments are drawn by the
schema of the operator where there is one: numbers at the ends of 64 bits, zeros, texts, lists, tensors of
several dtypes. Outcomes: refused, an error, a result. Anything else is a defect, and the exit status 1: a
signal, no end within ``--limit`` seconds, more than ``--megabytes`` of memory for operators of Python.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import fx, nn

from backquant.artifact.functions import _functions, find_function
from backquant.artifact.graph import _check_arguments
from backquant.artifact.operators import is_method
from backquant.errors import ArtifactError, BackquantError
from backquant.graph.call_table import _forward

OUTCOMES = frozenset({"refused", "error of ours", "error", "result"})
ENDS = [0, 1, -1, 2, 3, 7, -(2**63), 2**63 - 1, 2**31, 2**62, 10**12, -(10**9), 2**64, 10**40]
FLOATS = [0.0, -1.0, 0.5, 1e308, 1e-308, float("inf"), float("nan")]
TEXTS = ["", "x", "%3000000000d", "floor", "trunc", "9" * 5000, "x" * 70000]
DTYPES = [torch.float32, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
SHAPES = [(), (0,), (1,), (3,), (2, 3), (2, 0, 3), (1, 2, 4, 4), (2, 3, 5)]
Arguments = tuple[list[Any], dict[str, Any]]


def tensor(dice: random.Random) -> torch.Tensor:
    dtype, shape = dice.choice(DTYPES), dice.choice(SHAPES)
    if dtype.is_floating_point:
        return torch.full(shape, dice.choice([0.0, 1.0, -1.0, 1e30]), dtype=dtype)
    if dtype is torch.bool:
        return torch.ones(shape, dtype=dtype)
    info = torch.iinfo(dtype)
    return torch.full(
        shape, dice.choice([info.min, info.max, 0, 1, -1 if info.min else 1]), dtype=dtype
    )


def number(dice: random.Random) -> Any:
    return dice.choice(ENDS) if dice.random() < 0.8 else dice.choice(FLOATS)


def anything(dice: random.Random) -> Any:
    kind = dice.randrange(8)
    if kind < 3:
        return number(dice)
    if kind < 5:
        return tensor(dice)
    if kind == 5:
        return dice.choice(TEXTS)
    if kind == 6:
        return [number(dice) for _ in range(dice.randrange(4))]
    return dice.choice(
        [None, True, [[1], [2]], [0] * 60000, [tensor(dice), tensor(dice)], (1, "x")]
    )


def of_type(kind: str, dice: random.Random) -> Any:
    """A value for an argument of a schema."""
    if dice.random() < 0.05:
        return anything(dice)
    if kind.startswith("Optional["):
        return None if dice.random() < 0.3 else of_type(kind[9:-1], dice)
    if kind.startswith("List["):
        return [of_type(kind[5:-1], dice) for _ in range(dice.choice([0, 1, 2, 2, 3, 4]))]
    small = [0, 1, 1, 2, 3, -1]
    known = {
        "Tensor": lambda: tensor(dice),
        "int": lambda: dice.choice(small if dice.random() < 0.7 else ENDS[:10]),
        "number": lambda: number(dice),
        "float": lambda: dice.choice(FLOATS),
        "bool": lambda: dice.random() < 0.5,
        "str": lambda: dice.choice(TEXTS),
        "Device": lambda: torch.device("cpu"),
    }
    return known.get(kind, lambda: None)()


def by_schema(schema: Any, dice: random.Random) -> Arguments:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        if argument.has_default_value() and (args or kwargs) and dice.random() < 0.4:
            if not argument.kwarg_only:
                break
            continue
        value = of_type(str(argument.type), dice)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def schemas() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            found.setdefault(schema.name[6:], []).append(schema)
    return found


def callables() -> Iterator[tuple[str, str, list[Any]]]:
    """Kind of node, target, schemas."""
    known = schemas()
    for path in sorted(_functions()):
        name = path.rpartition(".")[2]
        mine = known.get(name, []) if path.startswith("torch.") else []
        yield "call_function", path, mine
    for name, own in sorted(known.items()):
        for schema in own:
            yield (
                "call_function",
                f"torch.ops.aten.{name}.{schema.overload_name or 'default'}",
                [schema],
            )
        yield "call_function", f"torch.ops.aten.{name}", own
    for name in sorted(
        {*dir(torch.Tensor), *dir(int), *dir(str), *dir(list), *dir(dict), *dir(float)}
    ):
        if is_method(name):
            yield "call_method", name, known.get(name, [])


class Attempt(NamedTuple):
    """One call: the kind of its node, its target, the schemas that it may have, a number that draws."""

    op: str
    path: str
    schemas: list[Any]
    draw: int

    @property
    def is_python(self) -> bool:
        return not self.path.startswith("torch.") and self.op == "call_function"

    def arguments(self, seed: int) -> Arguments:
        dice = random.Random(f"{seed}:{self.path}:{self.draw}")
        if self.schemas and dice.random() < 0.9:
            return by_schema(dice.choice(self.schemas), dice)
        args = [anything(dice) for _ in range(dice.choice([1, 1, 2, 2, 2, 3]))]
        if self.is_python and dice.random() < 0.1:  # what a node before it may have made
            args[0] = dice.choice([range(3), range(1 << 16), {"x": [1]}, [[0] * 200] * 200])
        return args, {}


class _Writer:
    """A graph of one call: tensors, and half of the numbers, are its inputs."""

    def __init__(self) -> None:
        self.graph, self.inputs = fx.Graph(), list[Any]()

    def written(self, value: Any) -> Any:
        if isinstance(value, list) and len(value) < 10:
            return [self.written(each) for each in value]
        is_number = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        if value is None or isinstance(value, (bool, torch.device, list)):
            return value
        if is_number and len(self.inputs) % 2:
            return value
        self.inputs.append(value)
        return self.graph.placeholder(f"x{len(self.inputs)}")


def tried(attempt: Attempt, seed: int) -> str:
    """Check the call as ``load`` does, and make it."""
    writer = _Writer()
    positional, named = attempt.arguments(seed)
    args = tuple(writer.written(value) for value in positional)
    kwargs = {key: writer.written(value) for key, value in named.items()}
    op, path = attempt.op, attempt.path
    target: Any = path
    try:
        is_function = op == "call_function"
        if is_function:
            target = find_function(path)
        checked = target if is_function else None
        _check_arguments(op, path, checked, args, kwargs, (), "node n")
    except ArtifactError:
        return "refused"
    writer.graph.output(writer.graph.create_node(op, target, args, kwargs))
    try:
        _forward(writer.graph)(nn.Module(), *writer.inputs)
    except MemoryError:
        return "memory" if attempt.is_python else "error"
    except BackquantError:
        return "error of ours"
    except Exception:
        return "error"
    return "result"


def child(todo: Sequence[Attempt], writing: int, chosen: argparse.Namespace) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for attempt in todo:
        room = chosen.megabytes if attempt.is_python else 4096
        resource.setrlimit(resource.RLIMIT_AS, (pages + (room << 20), resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_REAL, chosen.limit)
        outcome = tried(attempt, chosen.seed)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(writing, f"{outcome}\n".encode())
    os._exit(0)


def outcomes(todo: Sequence[Attempt], chosen: argparse.Namespace) -> Iterator[str]:
    """Of the first of ``todo``, until one ends the process."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        child(todo, writing, chosen)
    os.close(writing)
    with os.fdopen(reading) as stream:
        yield from (line.strip() for line in stream)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        yield signal.Signals(os.WTERMSIG(status)).name
    elif os.WEXITSTATUS(status):
        yield "exit"


def run(chosen: argparse.Namespace) -> Counter[str]:
    """The outcomes of all calls; defects are printed."""
    todo = [
        Attempt(*one, draw)
        for one in callables()
        if chosen.only is None or one[1] in chosen.only
        for draw in range(chosen.draws)
    ]
    counts: Counter[str] = Counter()
    place = 0
    while place < len(todo):
        for outcome in outcomes(todo[place:], chosen):
            if outcome not in OUTCOMES:
                attempt = todo[place]
                said = repr(attempt.arguments(chosen.seed))[:300].replace("\n", " ")
                print(f"{attempt.path}, draw {attempt.draw}: {outcome}: {said}", flush=True)
            counts[outcome] += 1
            place += 1
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="paths of callables")
    parser.add_argument("--limit", type=float, default=5)
    parser.add_argument("--megabytes", type=int, default=64)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts = run(chosen)
    print(dict(counts))
    return 0 if set(counts) <= OUTCOMES else 1


if __name__ == "__main__":
    sys.exit(main())
