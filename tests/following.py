"""Every fix that a message prints is applied to the call that printed it, and run: it has to succeed.

The call is found by construction: when an error of ours is made, the last frame outside of backquant is the
caller, with the very expression that is evaluated and the names that it reads. ``check`` is called for every
text that is compared with a snapshot, so that each fix in one is followed, or listed.

1. ``name=value, ...`` are arguments of that call.
2. ``did you mean 'x'?`` and ``one of ...`` replace the word that the message quotes, wherever the arguments
   hold it.
3. ``--option value`` and ``backquant ...`` are commands: added to, or in place of, the arguments of one.
4. Code runs with the call's arguments by their names; ``...`` stands for those that it does not name. A new
   model, mapping or config that it makes takes the place of the old one, and the call is repeated. Words of
   usage (``x``, ``batches``, ``loader``, ``MyModel``) stand for what the call was given; what others stand
   for a test module says in ``FIX_NAMES``.
5. ``key: value`` is data: it replaces that key in the argument, or the argument.
6. A sentence asks for other code, data or another description: ``BY_HAND`` of the test module does what it
   says, by the words that it begins with, and is run.
7. What lies outside of a program is of one of a few kinds: ``OUTSIDE``.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import linecache
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import yaml

import backquant
import backquant.observe
import backquant.qconfig
from backquant.errors import BackquantError

PEOPLE = Path(__file__).parent / "fixes_for_people.txt"
#: Rule 7: the kinds of what a program cannot do, and how the fixes of each begin.
OUTSIDE = {
    "a file is damaged, incomplete, or not what it is taken for: it comes from elsewhere": (
        r"(copy|download) .*again|load (it|the file|the checkpoint) |do not load this file|"
        r"the (config\.json|folder) (that|of)|a folder of a decoder|write all of them|"
        r"name (a \.safetensors file|the file that counts)|a checkpoint from before"
    ),
    "the code of another package, or of what makes a model of files": (
        r"raise backquant\.|see backquant\.|an object with the attributes|python -c|"
        r"make the model with|none here: describe"
    ),
    "a runtime lacks an operator, or computes it wrongly": (
        r"the operator named above|the targets |quantize for another target|leave rounding and|"
        r"leave parts out|write that part of the model with operators"
    ),
    "a disk or a folder has no room, or does not let us write": r"make room|choose a folder",
    "a package, or a build of one, is not installed, or twice": r"(un)?install |pip install",
    "another machine, or how a process is started on this one": (
        r"quantize again on this machine|set the environment variable|torchrun |backquant .*torchrun"
    ),
    "another rank has to do it": r"rank \d+ raised|see its own output|start as many ranks",
}
OURS = str(Path(backquant.__file__).parent)
_FIX = re.compile(r"^  fix {4}(?P<text>.*(?:\n {9}.*)*)$", re.MULTILINE)
_ARGUMENTS = re.compile(r"(?<![\w.(\[{])(\w+)=(?!=)")
_MEANT = re.compile(r"""did you mean (['"])(?P<word>.*?)\1""")
_ONE_OF = re.compile(
    r"""(?:one of|known:|it has:|functions:|choose one of|use) \[?(?P<word>['"]?[\w.*-]+['"]?)"""
)
_QUOTED = re.compile(r"""(['"])(.*?)\1""")

#: The errors that were made in a test, and the commands that it ran, the latest last.
made: list[tuple[BackquantError, Caller]] = []
_recording: list[bool] = [False]
commands: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []


def fixes_in(text: str) -> list[str]:
    """The fixes that a text prints.

    >>> fixes_in("no\\n  where  here\\n  fix    f(\\n         x)\\n")
    ['f(\\nx)']
    """
    return [found["text"].replace("\n         ", "\n") for found in _FIX.finditer(text)]


@cache
def listed() -> frozenset[str]:
    """The first lines of what is not followed."""
    lines = PEOPLE.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def is_for_people(fix: str) -> bool:
    """Rule 7, or listed."""
    line = fix.splitlines()[0].strip()
    return line in listed() or any(re.match(words, line) for words in OUTSIDE.values())


def done_by_hand(fix: str) -> bool:
    """Rule 6: whether the test's module does what the fix says; it has done it then."""
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_name.startswith("test_"):
        frame = frame.f_back
    names = {} if frame is None else {**frame.f_globals, **frame.f_locals}
    hands: dict[str, Callable[[str, dict[str, Any]], Any]] = names.get("BY_HAND", {})
    done = next((hand for words, hand in hands.items() if fix.strip().startswith(words)), None)
    if done is not None:
        done(fix, names)
    return done is not None


def _recorded(error: BackquantError, *args: Any, **kwargs: Any) -> None:
    _made(error, *args, **kwargs)
    if _recording[0] and (caller := Caller.now()) is not None:
        made.append((error, caller))


_made = BackquantError.__init__
BackquantError.__init__ = _recorded  # type: ignore[method-assign]


def start(*, records: bool) -> None:
    """Forget the test before."""
    _recording[0] = records
    made.clear()
    commands.clear()


def check(text: str) -> None:
    """Assert that each fix in a ``text`` works, or is for people."""
    for fix in fixes_in(text):
        if is_for_people(fix) or done_by_hand(fix):
            continue
        line = _plain(fix.splitlines()[0])
        printed = [one for one in made if _plain((one[0].fix.splitlines() or [""])[0]) == line]
        assert printed, f"no error of this test has the fix {line!r}: list it, or raise it here"
        try:
            followed(*printed[-1])
        except Exception as failure:
            what = f"the fix {line!r} does not work: {type(failure).__name__}: {failure}"
            raise AssertionError(what) from failure


def _plain(line: str) -> str:
    """Without what snapshots write in other words: folders, versions, names of modules."""
    places = r"(?:<\w+>|\bDIR\b|\bFOLDER\b|\bSOURCE\b|/tmp\b)(?:/[\w./-]*)?"
    return re.sub(rf"{places}|\d+\.\d+[\w.+]*|[\w.]*test_\w+", "", line).strip()[:60]


@dataclass(frozen=True)
class Caller:
    """Who called backquant when an error was made: the code, where in it, and the names that it saw then."""

    code: CodeType
    instruction: int
    names: dict[str, Any]
    is_command: bool

    @classmethod
    def now(cls) -> Caller | None:
        """That of the call that is running."""
        frames: list[FrameType] = []
        frame = inspect.currentframe()
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        inside = [i for i, one in enumerate(frames) if one.f_code.co_filename.startswith(OURS)]
        if not inside or inside[-1] + 1 == len(frames):
            return None
        outer = frames[inside[-1] + 1]
        runs = any("click" in one.f_globals.get("__name__", "") for one in frames[inside[-1] :])
        test = next((one for one in frames if one.f_code.co_name.startswith("test_")), outer)
        frames = [test] if runs else [test, outer]
        names = {k: v for one in frames for k, v in one.f_globals.items()}
        names |= {k: v for one in frames for k, v in one.f_locals.items()}
        return cls(outer.f_code, outer.f_lasti, names, runs and bool(commands))


@dataclass(frozen=True)
class Call:
    """A call that failed: ``function`` with what it was given, and the names around it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scope: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, caller: Caller) -> Call | None:
        """The call that a caller was in; ``None`` where that was no call."""
        if caller.is_command:
            function, argv = commands[-1]
            return cls(function, argv, {}, caller.names)
        node = _expression(caller.code, caller.instruction)
        if not isinstance(node, ast.Call):
            return None
        called = ast.Call(ast.Name("__taken__", ast.Load()), node.args, node.keywords)
        function = _value(ast.Expression(node.func), caller.names)
        taken = {**caller.names, "__taken__": lambda *a, **k: (a, k)}
        args, kwargs = _value(ast.Expression(called), taken)
        return cls(function, args, kwargs, caller.names)

    @property
    def named(self) -> dict[str, Any]:
        """Its arguments by their names."""
        try:
            bound = inspect.signature(self.function).bind_partial(*self.args, **self.kwargs)
        except (TypeError, ValueError):
            return dict(self.kwargs)
        found = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                found |= found.pop(name, {})
        return found

    def with_arguments(self, changed: Mapping[str, Any]) -> Call:
        """The same call with other arguments."""
        parameters = inspect.signature(self.function).parameters
        names = [name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY]
        args = tuple(
            changed.get(name, value) for name, value in zip(names, self.args, strict=False)
        )
        rest = {k: v for k, v in changed.items() if k not in names[: len(self.args)]}
        return replace(self, args=(*args, *self.args[len(args) :]), kwargs={**self.kwargs, **rest})

    def run(self) -> Any:
        """What it gives."""
        return self.function(*self.args, **self.kwargs)


def _expression(code: CodeType, instruction: int) -> ast.expr | None:
    """What is evaluated at an instruction, by the positions that Python keeps of it."""
    first, last, start, end = list(code.co_positions())[instruction // 2]
    if first is None or last is None:
        return None
    lines = linecache.getlines(code.co_filename)[first - 1 : last]
    encoded = [line.encode() for line in lines]
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    try:
        return ast.parse(b"(" + b"".join(encoded) + b")", mode="eval").body
    except SyntaxError:
        return None


def _value(tree: ast.Expression, names: dict[str, Any]) -> Any:
    return eval(compile(ast.fix_missing_locations(tree), "<fix>", "eval"), names)


def names_of(call: Call) -> dict[str, Any]:
    """What the words in a fix stand for: rule 4."""
    own, given = call.named, call.scope.get("FIX_NAMES", {})
    public = {
        name: getattr(room, name)
        for room in (backquant, backquant.qconfig, backquant.observe)
        for name in room.__all__
    }
    models = [v for v in own.values() if isinstance(v, torch.nn.Module)]
    batches = own.get("calibration", own.get("data"))
    batches = batches if isinstance(batches, list) and batches else [own.get("example_inputs")]
    path = str(Path(tempfile.mkdtemp()) / "fix.bq")
    found: dict[str, Any] = {**call.scope, "backquant": backquant, "torch": torch, **public}
    found["accuracy"] = lambda *given: 1.0
    models += [v for v in call.scope.values() if isinstance(v, torch.nn.Module)]
    model = models[0] if models else None
    found |= {"path": path, "model": model, "part": model, "MyModel": lambda *a, **k: model}
    one = ("example_inputs", "inputs", "input", "x", "batch")
    usual = dict.fromkeys(one, batches[0])
    usual |= dict.fromkeys(("batches", "data", "calibration", "loader"), batches)
    found |= usual if batches[0] is not None else {k: found.get(k) for k in usual}
    found |= {**own, **given}
    if found["example_inputs"] is None:
        found["example_inputs"] = batches[0]
    if isinstance(found["model"], backquant.QuantizedModel):
        found["quantized"] = found["model"]
    elif "quantized" not in found:
        found["quantized"] = _small()
    if found.get("qconfig_mapping") is None:
        backend = own.get("backend") or own.get("backend_config") or "x86"
        with contextlib.suppress(BackquantError):  # it may be what is wrong
            found["qconfig_mapping"] = backquant.default_mapping(backend)
    return found


@cache
def _small() -> backquant.QuantizedModel:
    """A quantized model, for fixes that begin with one."""
    return backquant.quantize(torch.nn.Linear(4, 4), calibration=[torch.ones(2, 4)])


def followed(error: BackquantError, caller: Caller) -> Any:
    """What the call gives that the fix of its error was applied to. ``LookupError``: rule 7."""
    call = Call.of(caller)
    if call is None:
        raise LookupError("there is no call that this error came from")
    for text in (error.fix, *error.fix.splitlines()[1:]):
        for way in (_as_command, _as_word, _as_arguments, _as_data, _as_code):
            again = way(call, text, error)
            if again is not None:
                return again()
    raise LookupError("a sentence, which no test follows by hand")


Way = Callable[[], Any]


def _as_command(call: Call, fix: str, error: BackquantError) -> Way | None:
    if not commands or call.function is not commands[-1][0]:
        return None
    given = call.scope.get("FIX_NAMES", {})
    meant = _MEANT.search(fix)
    words = shlex.split(fix.splitlines()[0].partition(", ")[0].split("   #")[0])
    if meant is not None:
        wrong = next(quoted for _, quoted in _QUOTED.findall(error.what))
        argv = [_respelt(one, wrong, meant["word"]) for one in call.args]
        for file in Path().glob("*.yaml"):  # the descriptions that the command reads
            text = file.read_text(encoding="utf-8")
            file.write_text(_respelt(text, wrong, meant["word"]), encoding="utf-8")
    elif words[:1] == ["backquant"]:
        argv = words[1:]
    elif words[0].startswith("-"):
        argv = list(call.args)
        while words[0] in argv:
            place = argv.index(words[0])
            del argv[place : place + 2]
        argv += words
    else:
        return None

    def run() -> Any:
        result = call.function(*[given.get(one, one) for one in argv])
        assert result.status == 0, result.err
        return result

    return run


def _as_word(call: Call, fix: str, error: BackquantError) -> Way | None:
    meant = _MEANT.match(fix) or _ONE_OF.match(fix)
    if meant is None:
        return None
    right = meant["word"].strip("'\"")
    numbers = re.findall(r"\b\d+\b", error.what) if right.isdigit() else []
    wrongs = [*(quoted for _, quoted in _QUOTED.findall(error.what)), *map(int, numbers)]
    wrongs.sort(key=lambda one: -SequenceMatcher(None, str(one), right).ratio())
    for wrong in wrongs:
        arguments = _respelt((call.args, call.kwargs), wrong, right)
        if _text(arguments) != _text((call.args, call.kwargs)):
            return replace(call, args=arguments[0], kwargs=arguments[1]).run
    return None


def _text(value: Any) -> str:
    """Everything that a value holds, as far as words go."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return _text(list(value.items()))
    return _text(vars(value)) if _is_a_config(value) else repr(value)


def _is_a_config(value: Any) -> bool:
    kind = type(value)
    return (
        kind.__module__.startswith("backquant.")
        and hasattr(value, "__dict__")
        and not isinstance(value, torch.nn.Module)
    )


def _respelt(value: Any, wrong: Any, right: str) -> Any:
    """``value`` with another word in each text, key, and attribute of a config."""
    if isinstance(wrong, int):
        if type(value) is int and value == wrong:
            return int(right)
    elif isinstance(value, str):
        return re.sub(rf"(?<!\w){re.escape(wrong)}(?!\w)", right, value)
    if isinstance(value, Mapping):
        return {_respelt(k, wrong, right): _respelt(v, wrong, right) for k, v in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_respelt(one, wrong, right) for one in value)
    if _is_a_config(value):
        made_anew = copy.copy(value)
        for name, held in vars(value).items():
            object.__setattr__(made_anew, name, _respelt(held, wrong, right))
        return made_anew
    return value


def _as_arguments(call: Call, fix: str, error: BackquantError) -> Way | None:
    """Rule 1: the longest text that begins with an argument of the call and is code."""
    try:
        parameters = inspect.signature(call.function).parameters
    except (TypeError, ValueError):
        return None
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for start in _ARGUMENTS.finditer(fix):
        if start[1] not in parameters and start.start() > 0:
            continue
        if start[1] not in parameters and not takes_all and len(call.args) != 1:
            continue
        text = fix[start.start() :]
        ends = [len(text), *(found.start() for found in re.finditer(r",|;|\s|$", text))]
        for end in sorted(ends, reverse=True):
            try:
                tree: Any = ast.parse(f"dict({text[:end]})", mode="eval").body
            except SyntaxError:
                continue
            if tree.args or not tree.keywords:
                continue
            names = names_of(call)
            wished = {one.arg: _value(_whole(one.value), names) for one in tree.keywords}
            if start[1] not in parameters and len(call.args) == 1 and not call.kwargs:
                return replace(call, args=(wished[start[1]],)).run
            return call.with_arguments(wished).run
    return None


def _whole(node: Any) -> ast.Expression:
    """Without ``...`` in lists."""
    for one in ast.walk(node):
        if isinstance(one, (ast.List, ast.Tuple, ast.Set)):
            one.elts = [held for held in one.elts if not _is_dots(held)]
    return ast.Expression(node)


def _is_dots(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _as_data(call: Call, fix: str, error: BackquantError) -> Way | None:
    """Rule 5."""
    if not re.match(r"\{?\w+: |\{", fix):
        return None
    try:
        wished = yaml.safe_load(fix.splitlines()[0].partition(", or")[0])
    except yaml.YAMLError:
        return None
    if not isinstance(wished, dict) or not call.args:
        return None
    inside = _with_keys(call.args[0], wished)
    return replace(call, args=(wished if inside is None else inside, *call.args[1:])).run


def _with_keys(data: Any, wished: Mapping[str, Any]) -> Any:
    """``data`` with the values of ``wished`` where it has their keys; ``None`` where it has none."""
    if not isinstance(data, Mapping):
        return None
    if wished.keys() <= data.keys():
        return {**data, **wished}
    for key, value in data.items():
        if (inside := _with_keys(value, wished)) is not None:
            return {**data, key: inside}
    return None


def _as_code(call: Call, fix: str, error: BackquantError) -> Way | None:
    tree = _code(fix)
    if tree is None:
        return None
    names = names_of(call)
    tree = ast.fix_missing_locations(_Filled(call, names).visit(tree))

    def run() -> Any:
        names["qconfig_mapping"] = copy.deepcopy(names.get("qconfig_mapping"))
        *before, last = tree.body
        if before and ast.unparse(last).startswith("print("):  # more to look at
            *before, last = before
        exec(compile(ast.Module(before, []), "<fix>", "exec"), names)
        value = _value(ast.Expression(last.value), names)
        if ".save(" in error.fix and value is None:  # what is written is read
            return backquant.load(names["path"])
        if isinstance(last, ast.Assign):
            names[last.targets[0].id] = value
        if isinstance(value, backquant.QuantizedModel | backquant.Report):
            return value
        for name, kind in _REPLACED.items():
            if isinstance(value, kind):
                parameters = inspect.signature(call.function).parameters
                other = next((p for p in parameters if p in (name, *_ALSO.get(name, ()))), None)
                return call.with_arguments({other: value}).run() if other else value
        repeats = value is None and not error.fix.startswith("print(")
        return call.run() if repeats else value

    return run


_REPLACED: dict[str, type] = {
    "model": torch.nn.Module,
    "qconfig_mapping": backquant.QConfigMapping,
    "prepare_custom_config": backquant.PrepareCustomConfig,
    "convert_custom_config": backquant.ConvertCustomConfig,
    "calibration": torch.utils.data.DataLoader,
}
_ALSO = {"model": ("graph_module", "quantized", "module", "prepared")}


def _code(text: str) -> Any:
    """The code that a fix is, begins with, or has after a colon."""
    bare = "\n".join(line.split("   #")[0].split("  #")[0] for line in text.splitlines())
    first = bare.splitlines()[0]
    _, _, after = first.partition(": ")
    for candidate in (bare, first, *_beginnings(first), after, *_beginnings(after)):
        try:
            tree = ast.parse(candidate.strip())
        except SyntaxError:
            continue
        is_code = tree.body and isinstance(tree.body[-1], (ast.Expr, ast.Assign))
        known = (ast.Call, ast.Attribute) if candidate is bare else ast.Call
        if is_code and any(isinstance(one, known) for one in ast.walk(tree)):
            return tree
    return None


def _beginnings(line: str) -> Iterator[str]:
    places = [found.start() for found in re.finditer(r", |; | or | and | if | in | for |\)", line)]
    for place in reversed(places):
        yield line[: place + (line[place] == ")")]


class _Filled(ast.NodeTransformer):
    """``...`` among arguments: those of the failing call that are not named there."""

    def __init__(self, call: Call, names: dict[str, Any]) -> None:
        self.call, self.names = call, names

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        for one in node.keywords:
            if _is_dots(one.value):
                one.value = ast.Name(str(one.arg), ast.Load())
        if any(map(_is_dots, node.args)):
            node.args = [one for one in node.args if not _is_dots(one)]
            function = _value(ast.Expression(node.func), self.names)
            parameters = [*inspect.signature(function).parameters]
            known = {**self.call.named, **self.call.scope.get("FIX_NAMES", {})}
            said = {*(one.arg for one in node.keywords), *parameters[: len(node.args)]}
            name = f"__rest{len(self.names)}__"
            self.names[name] = {k: known[k] for k in parameters if k in known and k not in said}
            node.keywords.append(ast.keyword(None, ast.Name(name, ast.Load())))
        return node
