"""Mutated artifacts of several models through ``backquant.load`` and three calls, in forked processes.

    python tools/fuzz_artifact.py --count 2000 --seed 0
    python tools/fuzz_artifact.py --count 50000 --log run.txt            # each outcome, a line
    python tools/fuzz_artifact.py --count 50000 --log run.txt --resume   # goes on where it was ended
    python tools/fuzz_artifact.py --seed 7 --only 1234      # one mutant again, with what it raised
    python tools/fuzz_artifact.py --names --count 50000     # names are spelled otherwise: fuzz_names.py

A process tries ``BATCH`` mutants, one after the other; one that is no good is tried again in a process of its
own, and the rest goes on in a new one. The description of the backend is read once for each of its texts.

Values of the manifest are replaced, removed, doubled and swapped; names of operators, arguments, shapes,
dtypes, strides and numbers of tensors change, and the digests are computed again, as an attacker would. Of
one in eight the bytes of the file are flipped and cut, and the digests stay. A mutant is made from ``seed``
and its number alone. Memory that is freed is overwritten (``MALLOC_PERTURB_``), guard tensors lie around
those of the model, memory and time are limited.

Outcomes: equal, other numbers, refused by ``load``, an error of ours by the call. Anything else is a defect,
and the exit status 1: a signal, a change of a guard tensor, a raw error, an error that does not say that it
is the file's, more memory in ``load`` than twice the file, ``MANIFEST`` times its header and ``SPARE`` (of a
header that is too long, ``SPARE`` alone), no end within ``--limit`` seconds;
what is executed, compiled, opened to be written, started, connected to, or imported from beyond torch, its
own packages and Python's (``watch.py``); and with the old digests any outcome but a refusal or equal numbers.
Of a name that is spelled otherwise: other numbers, two modules that became one, memory of the call.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import backquant
from backquant import QConfigMapping, default_dynamic_qconfig
from backquant.artifact import store
from backquant.artifact.file import manifest_text, packed, read_file
from backquant.artifact.functions import _all_torch_functions, _functions
from backquant.artifact.manifest import LONGEST
from backquant.errors import ArtifactError, BackquantError, EngineError
from backquant.qconfig import (
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
)

import fuzz_names  # isort: skip
from watch import Watch  # isort: skip

OUTCOMES = ("equal", "other numbers", "refused", "error of the call")
DEFECTS = ("raw error of load", "raw error of the call", "guard changed", "memory of load")
MEMORY = 4 << 30
BATCH = 200
SPARE = 96 << 20  # what the libraries take at their first use
MANIFEST = 40  # bytes in memory for each one: numbers of one digit in a list


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv1(x))
        y = nn.functional.max_pool2d(y + self.conv2(y), 2)
        y = nn.functional.interpolate(
            nn.functional.hardswish(self.up(y)), scale_factor=2.0, mode="bilinear"
        )
        return self.fc(torch.cat([y, y], 2).mean((2, 3)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(self.table(words))
        y = self.attention(y)
        return self.fc(y[:, -1].repeat_interleave(2, 0)).softmax(-1)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, mode="sum")
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 4)
        self.register_buffer("order", torch.tensor([1, 0, 2, 1]))

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.bag(words, offsets))
        return self.fc(y)[:, self.order].view(-1, 2, 2).transpose(1, 2)


class Heads(nn.Module):
    """Modules under names that Python reads as something else, and one under two names."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.heads = nn.ModuleDict(
            {name: nn.Linear(8, 4) for name in ("in", "\xb5", "\u03bc", "a b")}
        )
        self.first, self.second = shared, shared
        self.codes = nn.Embedding(20, 8)

    def forward(self, x: torch.Tensor, *, words: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.second(torch.relu(self.first(x))) + self.codes(words).mean(dim=1, keepdim=False)
        return {name: head(y) * place for place, (name, head) in enumerate(self.heads.items())}


@dataclass(frozen=True)
class Seed:
    """An artifact that is well, and what it gives. ``text``: the document as JSON; ``modules``: how many it
    has."""

    name: str
    text: str
    tensors: dict[str, torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    named: dict[str, torch.Tensor]
    wanted: Any
    modules: int


def seeds(folder: Path) -> Iterator[Seed]:
    """Static and dynamic models of several engines, a reference model, one that was exported."""
    torch.manual_seed(0)
    image = torch.randn(2, 3, 8, 8)
    words = torch.randint(0, 20, (2, 5))
    bags = (torch.randint(0, 20, (6,)), torch.tensor([0, 2, 3]))
    dynamic = (
        QConfigMapping()
        .set_global(default_dynamic_qconfig)
        .set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
        .set_object_type(nn.EmbeddingBag, float_qparams_weight_only_qconfig)
    )
    for backend in ("x86", "fbgemm", "qnnpack", "tensorrt"):
        model = backquant.quantize(Images().eval(), backend=backend, calibration=[image])
        yield _seed(f"images on {backend}", model, (image,), folder)
    for capture in ("trace", "export"):
        if capture == "trace":
            model = backquant.quantize(
                Words().eval(), words, backend="fbgemm", qconfig_mapping=dynamic, capture=capture
            )
            yield _seed("words", model, (words,), folder)
            model = backquant.quantize(
                Bags().eval(), bags, backend="fbgemm", qconfig_mapping=dynamic
            )
            yield _seed("bags", model, bags, folder)
        else:
            layer = nn.Sequential(
                nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            )
            x = torch.randn(2, 5, 8)
            model = backquant.quantize(
                layer.eval(), backend="x86", calibration=[x], capture=capture
            )
            yield _seed("attention", model, (x,), folder)


def named_seeds(folder: Path) -> Iterator[Seed]:
    """Models with odd names, weights of four bits, and keywords."""
    torch.manual_seed(1)
    inputs = {"x": torch.randn(2, 8), "words": torch.randint(0, 20, (2, 5))}
    four = QConfigMapping().set_global(default_dynamic_qconfig)
    four.set_object_type(nn.Embedding, float_qparams_weight_only_qconfig_4bit)
    model = backquant.quantize(Heads().eval(), inputs, backend="fbgemm", qconfig_mapping=four)
    yield _seed("heads", model, (), folder, inputs)
    model = backquant.quantize(
        Heads().eval(), backend="x86", calibration=[inputs], capture="export"
    )
    yield _seed("exported heads", model, (), folder, inputs)
    layer, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)), torch.randn(2, 64)
    model = backquant.quantize(layer.eval(), x, backend="x86_lowbit", weights="int4", group_size=32)
    yield _seed("int4", model, (x,), folder)


def _seed(
    name: str,
    model: Any,
    inputs: tuple[torch.Tensor, ...],
    folder: Path,
    named: dict[str, torch.Tensor] | None = None,
) -> Seed:
    backquant.save(model, folder / "seed.bq")
    document, tensors = read_file(folder / "seed.bq")
    named = named or {}
    for _ in range(4):  # what is imported and made at the first use
        wanted = backquant.load(folder / "seed.bq")(*inputs, **named)
    modules = count_modules(backquant.load(folder / "seed.bq"))
    return Seed(name, json.dumps(document), tensors, inputs, named, wanted, modules)


def count_modules(model: Any) -> int:
    return len(set(map(id, model.graph_module.modules())))


# ---- mutations -----------------------------------------------------------------------------------

NUMBERS = [
    -1,
    0,
    1,
    2,
    3,
    7,
    64,
    255,
    256,
    65536,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    -(2**63),
    2**64,
]
NUMBERS += [1e-300, 1e-8, 0.5, 1e8, 1e300, -1.0]
ODD = [
    None,
    True,
    "",
    "x",
    "cpu",
    "t0",
    "../x",
    "\udcff",
    [],
    {},
    [[]],
    {"float": "nan"},
    {"float": "inf"},
]
ODD += [
    {"node": "x"},
    {"tensor": "t0"},
    {"dtype": "uint8"},
    {"dtype": "bool"},
    {"dtype": "float64"},
]
ODD += [{"dtype": "quint8"}, {"layout": "sparse_coo"}, {"device": "meta"}, {"slice": [0, 99, 1]}]
_words = re.compile(r"\w+").findall
METHODS = _words("""
view reshape expand permute as_strided set_ resize_ repeat unfold index_select gather narrow item
tolist data_ptr storage untyped_storage copy_ fill_ add_ t_ squeeze_ transpose to float long bool type
new_empty contiguous repeat_interleave nonzero flatten select split chunk roll scatter take sort topk
""")
DEEP = "@deep"  # in the text: lists in lists
Path_ = tuple[Any, ...]


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The path of everything in a document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield (*path, index)
            yield from places(inner, (*path, index))


def at(value: Any, path: Path_) -> Any:
    for key in path:
        value = value[key]
    return value


def change_value(document: dict[str, Any], dice: random.Random, paths: list[Path_]) -> None:
    """One value becomes another, goes, is doubled, or trades places."""
    path = dice.choice(paths)
    owner, key = at(document, path[:-1]), path[-1]
    kind = dice.random()
    if kind < 0.35:
        owner[key] = dice.choice(NUMBERS)
    elif kind < 0.5:
        owner[key] = copy.deepcopy(dice.choice(ODD))
    elif kind < 0.75:
        owner[key] = copy.deepcopy(at(document, dice.choice(paths)))
    elif kind < 0.85:
        del owner[key]
    elif isinstance(owner, list):
        owner.insert(key, copy.deepcopy(owner[key]))
    else:
        owner[key] = DEEP


def change_number(document: dict[str, Any], dice: random.Random, paths: list[Path_]) -> None:
    """A number of a configuration or of an argument changes a little, or much."""
    numbers = [path for path in paths if type(at(document, path)) in (int, float)]
    path = dice.choice(numbers)
    old = at(document, path)
    new = [old + 1, old - 1, old * 2, -old, old // 2 if old else 3, *NUMBERS]
    at(document, path[:-1])[path[-1]] = dice.choice(new)


def change_call(document: dict[str, Any], dice: random.Random, functions: list[str]) -> None:
    """A node calls something else, or with other arguments."""
    rows = document["model"]["graph"]
    calls = [row for row in rows if row["op"] not in ("placeholder", "output")]
    row = dice.choice(calls)
    names = [other["name"] for other in rows]
    kind = dice.random()
    if kind < 0.4:
        row["op"], row["target"] = "call_function", dice.choice(functions)
    elif kind < 0.55:
        row["op"], row["target"] = "call_method", dice.choice(METHODS)
    elif kind < 0.65:
        row["target"] = dice.choice(calls)["target"]
    if kind > 0.3:
        args = row.setdefault("args", [])
        what = dice.choice(
            [dice.choice(NUMBERS), {"node": dice.choice(names)}, copy.deepcopy(dice.choice(ODD))]
        )
        what = [what] * dice.choice((1, 2)) if dice.random() < 0.3 else what
        args.insert(dice.randint(0, len(args)), what)
        if dice.random() < 0.5 and len(args) > 1:
            del args[dice.randrange(len(args))]
    if dice.random() < 0.1:
        name = dice.choice(
            ["dim", "out", "dtype", "size", "key", "stride", "padding", "groups", "scale_factor"]
        )
        row.setdefault("kwargs", {})[name] = copy.deepcopy(dice.choice([*NUMBERS, *ODD]))


DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bool,
]


def change_tensor(tensors: dict[str, torch.Tensor], dice: random.Random) -> None:
    """A tensor has another shape or dtype, other numbers, or is another's."""
    key = dice.choice(list(tensors))
    tensor = tensors[key]
    kind = dice.randrange(8)
    if kind == 0:
        tensors[key] = tensor.flatten()
    elif kind == 1:
        tensors[key] = tensor.unsqueeze(0)
    elif kind == 2 and tensor.dim():
        tensors[key] = tensor.narrow(0, 0, max(tensor.shape[0] // 2, 0)).clone()
    elif kind == 3 and tensor.dim() > 1:
        tensors[key] = tensor.transpose(0, 1).contiguous()
    elif kind == 4:
        tensors[key] = tensor.to(dice.choice(DTYPES))
    elif kind == 5:
        other = tensors[dice.choice(list(tensors))]
        tensors[key] = other.clone()
    elif kind == 6:
        extreme = dice.choice([-1, 0, 1, 127, 10**6, 2**62])
        tensors[key] = torch.full_like(tensor.double(), extreme).to(tensor.dtype)
    else:
        tensors[key] = torch.zeros(
            [dice.choice((0, 1, 3, 100)) for _ in range(dice.randint(0, 5))][:3],
            dtype=tensor.dtype,
        )


def change_strides(
    document: dict[str, Any], tensors: dict[str, torch.Tensor], dice: random.Random
) -> None:
    key = dice.choice(list(tensors))
    document["strides"][key] = [dice.choice(NUMBERS) for _ in range(tensors[key].dim())]


def change_bytes(payload: bytes, dice: random.Random) -> bytes:
    """Bits are flipped in the header or in the tensors, the length of the header changes, the end is cut."""
    data = bytearray(payload)
    header = struct.unpack("<Q", data[:8])[0]
    kind = dice.randrange(5)
    if kind == 0:
        return bytes(data[: dice.randrange(len(data))])
    if kind == 1:
        data[:8] = struct.pack(
            "<Q", dice.choice([0, 1, header - 1, header + 1, 2**31, 2**63, 2**64 - 1])
        )
        return bytes(data)
    low, high = (8, 8 + header) if kind in (2, 3) else (8 + header, len(data))
    for _ in range(dice.choice((1, 1, 2, 8))):
        data[dice.randrange(low, max(high, low + 1))] ^= 1 << dice.randrange(8)
    return bytes(data)


def change_table(text: str, dice: random.Random) -> str:
    """An entry of the table of tensors changes."""
    document = json.loads(text)
    change_value(document, dice, [("tensors", *path) for path in places(document["tensors"])])
    return json.dumps(document)


def mutant(seed: Seed, dice: random.Random, functions: list[str]) -> tuple[bytes, bool]:
    """The bytes of a file that is not what was saved, and whether its digests are right."""
    document, tensors = json.loads(seed.text), dict(seed.tensors)
    kind = dice.random()
    model_only: list[Path_] = []
    if 0.15 <= kind < 0.45:
        model_only = [("model", *path) for path in places(document["model"])]
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        try:
            if kind < 0.15:
                change_value(document, dice, list(places(document)))
            elif kind < 0.3:
                change_value(document, dice, model_only)
            elif kind < 0.45:
                change_number(document, dice, model_only)
            elif kind < 0.7:
                change_call(document, dice, functions)
            elif kind < 0.82:
                change_tensor(tensors, dice)
            elif kind < 0.85:
                change_strides(document, tensors, dice)
        except (
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            OverflowError,
            RuntimeError,
            ValueError,
        ):
            continue  # what an earlier change left cannot be changed so
    tensors = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    text = manifest_text(document, tensors)
    if 0.85 <= kind < 0.88:
        text = change_table(text, dice)
    levels = dice.choice((1, 40, 3000, 100_000))
    text = text.replace(f'"{DEEP}"', "[" * levels + "]" * levels)
    payload = packed(text, tensors)
    return (change_bytes(payload, dice), False) if kind >= 0.88 else (payload, True)


# ---- running -------------------------------------------------------------------------------------


def tried(seed: Seed, path: Path, told: bool, *, keeps_numbers: bool = False) -> str:
    """Load and call; the outcome. ``keeps_numbers``: only names are not those that were saved."""
    guards = [torch.full((1024,), 90, dtype=torch.uint8) for _ in range(32)]
    before = begin_peak()
    try:
        model = backquant.load(path)
    except (ArtifactError, EngineError) as error:
        if told:
            print(f"{type(error).__name__}: {error}")
        return "refused" if peak() - before <= limit_of(path) else "memory of load"
    except Exception:
        traceback.print_exc()
        return "raw error of load"
    if peak() - before > limit_of(path):
        return "memory of load"
    guards += [torch.full((1024,), 90, dtype=torch.uint8) for _ in range(32)]
    if count_modules(model) < seed.modules and keeps_numbers:
        return "modules became one"
    try:
        results = [
            model(
                *(x.clone() for x in seed.inputs), **{k: x.clone() for k, x in seed.named.items()}
            )
            for _ in range(3)
        ]
        outcome = "equal" if all(_equal(one, seed.wanted) for one in results) else "other numbers"
    except BackquantError as error:
        # where the example that the file names was changed, the inputs may be called wrong
        outcome = "error of the call"
        if told:
            print(f"{type(error).__name__}: {error}")
    except Exception:
        traceback.print_exc()
        outcome = "raw error of the call"
    if not all(bool((guard == 90).all()) for guard in guards):
        return "guard changed"
    if keeps_numbers and outcome == "other numbers":
        return "a name changed the numbers"
    return "memory of the call" if keeps_numbers and peak() - before > limit_of(path) else outcome


def begin_peak() -> int:
    """Bytes of memory now; the peak is measured from here, where the system lets it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The most bytes of memory that were resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def limit_of(path: Path) -> int:
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
    return SPARE if LONGEST < header < size else 2 * size + MANIFEST * min(header, size) + SPARE


def _equal(one: Any, two: Any) -> bool:
    if isinstance(two, dict):  # whose keys are texts of the file
        same = isinstance(one, dict) and len(one) == len(two)
        return same and all(map(_equal, one.values(), two.values()))
    return isinstance(one, torch.Tensor) and one.shape == two.shape and torch.equal(one, two)


@dataclass(frozen=True)
class Trial:
    """How mutants are tried: the models, the names of functions, a folder, and what was asked."""

    seeds: list[Seed]
    functions: list[str]
    folder: Path
    chosen: argparse.Namespace
    watch: Watch

    def made(self, number: int) -> tuple[Seed, bytes, bool]:
        """The mutant of that number; whether its digests were computed again."""
        dice = random.Random(f"{self.chosen.seed}:{number}")
        seed = dice.choice(self.seeds)
        if self.chosen.names:
            return seed, fuzz_names.mutant(seed.text, seed.tensors, dice)[0], True
        return (seed, *mutant(seed, dice, self.functions))

    def outcome(self, number: int) -> tuple[str, bool]:
        """Load and call the mutant in this process."""
        seed, payload, is_signed = self.made(number)
        path = self.folder / "mutant.bq"
        path.write_bytes(payload)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        end = int(usage.ru_utime + usage.ru_stime) + 1 + self.chosen.limit
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        signal.alarm(10 * self.chosen.limit)
        self.watch.begin()
        told = self.chosen.only is not None
        outcome = tried(seed, path, told, keeps_numbers=self.chosen.names)
        forbidden = self.watch.end()
        return f"forbidden: {forbidden}" if forbidden else outcome, is_signed

    def batch(self, numbers: Sequence[int]) -> Iterator[tuple[int, str, bool]]:
        """The outcomes of the first of ``numbers``, until one ends the process or is no good."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            self._child(numbers, writing)
        os.close(writing)
        done = 0
        with os.fdopen(reading) as stream:
            for line in stream:
                outcome, is_signed = line.rstrip("\n").rsplit(",", 1)
                yield numbers[done], outcome, is_signed == "True"
                done += 1
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            ended = signal.Signals(os.WTERMSIG(status)).name
            is_endless = ended in ("SIGXCPU", "SIGKILL", "SIGALRM")
            outcome = "no end" if is_endless else f"signal {ended}"
            yield numbers[done], outcome, self.made(numbers[done])[2]

    def _child(self, numbers: Sequence[int], writing: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
        if self.chosen.only is None:
            os.dup2(os.open(self.folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        self.watch.install()
        for number in numbers:
            outcome, is_signed = self.outcome(number)
            os.write(writing, f"{outcome},{is_signed}\n".encode())
            if outcome not in OUTCOMES:
                break
        sys.stdout.flush()
        os._exit(0)


def run(chosen: argparse.Namespace, say: Callable[[str], None] = print) -> Counter[tuple[str, str]]:
    """Outcomes, by whether the digests were computed again."""
    functions = sorted({*_functions(), *_all_torch_functions(), *_known_holes()})
    store._config = cache_by_text(store._config)
    with tempfile.TemporaryDirectory() as name:
        models = list(seeds(Path(name)))
        models += named_seeds(Path(name)) if chosen.names else ()
        trial = Trial(models, functions, Path(name), chosen, Watch())
        for seed in trial.seeds:
            store._config(json.loads(seed.text)["backend"], ())
        counts = _logged(chosen)
        first = sum(counts.values())
        numbers = range(first, chosen.count) if chosen.only is None else [chosen.only]
        end = time.monotonic() + chosen.seconds if chosen.seconds else float("inf")
        place = 0
        while place < len(numbers) and time.monotonic() < end:
            for number, first_outcome, is_signed in trial.batch(numbers[place : place + BATCH]):
                place += 1
                outcome = _noted(trial, number, first_outcome, is_signed, say)
                counts["digests computed again" if is_signed else "old digests", outcome] += 1
    return counts


def cache_by_text(read: Callable[..., Any]) -> Callable[..., Any]:
    """Descriptions by what they are read from: nearly all mutants have that of their seed."""
    known: dict[str, Any] = {}

    def cached(stored: dict[str, str], allow: tuple[str, ...]) -> Any:
        text = json.dumps(stored)
        if text not in known:
            known[text] = read(stored, allow)
        return known[text]

    return cached


def _again(trial: Trial, number: int, outcome: str) -> str:
    """What it is in a process of its own."""
    ((_, alone, _),) = trial.batch([number])
    return alone if alone not in OUTCOMES else f"{outcome} after others"


def _noted(
    trial: Trial, number: int, outcome: str, is_signed: bool, say: Callable[[str], None]
) -> str:
    """The outcome as it counts; printed, kept and logged where that is asked for."""
    chosen, told = trial.chosen, trial.chosen.only is not None
    if outcome not in OUTCOMES and not told:
        outcome = _again(trial, number, outcome)
    if not is_signed and outcome in ("other numbers", "error of the call"):
        outcome = f"unnoticed: {outcome}"
    if outcome not in OUTCOMES or told:
        seed, payload, _ = trial.made(number)
        said = "" if told else (trial.folder / "said.txt").read_text(errors="replace")[-600:]
        say(f"{number}: {seed.name}: {outcome} {said}")
        if chosen.keep:
            chosen.keep.mkdir(exist_ok=True)
            (chosen.keep / f"{chosen.seed}-{number}.bq").write_bytes(payload)
    if chosen.log:
        with chosen.log.open("a") as stream:
            stream.write(f"{number} {int(is_signed)} {outcome}\n")
    return outcome


def _logged(chosen: argparse.Namespace) -> Counter[tuple[str, str]]:
    """Outcomes of the run that is resumed."""
    counts: Counter[tuple[str, str]] = Counter()
    if chosen.resume and chosen.log and chosen.log.exists():
        for line in chosen.log.read_text().splitlines():
            _, is_signed, outcome = line.split(" ", 2)
            counts["digests computed again" if is_signed == "1" else "old digests", outcome] += 1
    elif chosen.log:
        chosen.log.write_text("")
    return counts


def _known_holes() -> list[str]:
    ops = torch.ops.aten
    named = _words("""
        as_strided _reshape_alias set_ resize_ _unsafe_index empty native_batch_norm upsample_bilinear2d
        index index_put gather slice select scatter add convolution max_pool2d_with_indices embedding view
    """)
    return [f"torch.ops.{getattr(ops, name)}" for name in named]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seconds", type=float, help="end after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--names", action="store_true", help="change names: fuzz_names.py")
    parser.add_argument("--only", type=int, help="number of one mutant")
    parser.add_argument("--limit", type=int, default=10, help="seconds of CPU for each")
    parser.add_argument("--log", type=Path, help="file for the outcome of each")
    parser.add_argument("--resume", action="store_true", help="go on after the last one of --log")
    parser.add_argument("--keep", type=Path, help="folder for the files of defects")
    chosen = parser.parse_args(arguments)
    if "MALLOC_PERTURB_" not in os.environ:  # read by the C library when a process begins
        os.environ["MALLOC_PERTURB_"] = "165"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    torch.set_num_threads(1)
    counts = run(chosen)
    for (name, outcome), count in sorted(counts.items()):
        print(f"{name:20} {outcome:20} {count:6}")
    totals: Counter[str] = Counter()
    for (_, outcome), count in counts.items():
        totals[outcome] += count
    print(
        f"{sum(totals.values())} mutants: "
        + ", ".join(f"{n} {o}" for o, n in sorted(totals.items()))
    )
    return 0 if all(outcome in OUTCOMES for outcome in totals) else 1


if __name__ == "__main__":
    sys.exit(main())
