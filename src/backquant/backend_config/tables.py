"""Support tables of a backend as text, Markdown and HTML, made from its description.

A row is a run of entries that differ in their operators only. Columns:

* ``operators``: patterns in the order in which they are registered;
* ``modes``: static, dynamic, weight-only, float (see ``describe.mode_of``);
* ``dtypes``: what is admitted, first choice first; rendered as letters that a legend explains;
* ``per_channel``: whether the weight may have one scale per channel;
* ``fused_as``, ``qat``, ``reference``: the modules that it becomes;
* ``observation``: where observers stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from backquant.backend_config.config import BackendConfig
from backquant.backend_config.declared import phrases, set_fields
from backquant.backend_config.defaults import BackendDefaults, DefaultOverride
from backquant.backend_config.describe import describe_dtype_config, describe_entry, mode_of
from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.leave_float import LeaveFloat
from backquant.backend_config.naming import operator_label
from backquant.backend_config.observation import ObservationType
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.dtypes import Granularity
from backquant.markup import Child, markdown, table, tag

#: Field of ``SupportRow`` → heading.
COLUMNS = {
    "operators": "operators",
    "modes": "quantization",
    "dtypes": "dtypes",
    "per_channel": "per channel",
    "fused_as": "fused as",
    "qat": "QAT",
    "reference": "reference",
    "observation": "output qparams",
}
_OBSERVATIONS = {
    ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT: "own",
    ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT: "shared",
    ObservationType.INPUT_OUTPUT_NOT_OBSERVED: "none",
}
#: Heading → least width, for terminals.
_TEXT_COLUMNS = {
    "operators": 30,
    "quantization": 11,
    "dtypes": 6,
    "per\nchannel": 7,
    "becomes": 26,
    "output\nqparams": 9,
}
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class SupportRow:
    """One row; every cell is a tuple of lines, empty where nothing applies."""

    operators: tuple[str, ...]
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    per_channel: tuple[str, ...]
    fused_as: tuple[str, ...]
    qat: tuple[str, ...]
    reference: tuple[str, ...]
    observation: tuple[str, ...]

    def to_dict(self) -> dict[str, list[str]]:
        """The row as JSON-able data, by the names of its fields.

        >>> row = SupportRow(("torch.add",), ("static",), (), (), (), (), (), ("own",))
        >>> row.to_dict()["operators"]
        ['torch.add']
        """
        return {name: list(getattr(self, name)) for name in COLUMNS}


def support_rows(config: BackendConfig) -> list[SupportRow]:
    """The rows of the support table, in the order of the entries.

    >>> import torch
    >>> from backquant.backend_config import BackendPatternConfig, DTypeConfig
    >>> int8 = DTypeConfig(torch.quint8, torch.quint8)
    >>> entries = [BackendPatternConfig(op).add_dtype_config(int8) for op in (torch.add, torch.mul)]
    >>> [row] = support_rows(BackendConfig("mine").set_backend_pattern_configs(entries))
    >>> row.operators, row.dtypes
    (('torch.add', 'torch.mul'), ('static: quint8 → quint8',))
    """
    rows: list[SupportRow] = []
    for entry in config.configs:
        row = _row(entry)
        if rows and replace(rows[-1], operators=()) == replace(row, operators=()):
            rows[-1] = replace(row, operators=rows[-1].operators + row.operators)
        else:
            rows.append(row)
    return rows


def _title(config: BackendConfig) -> str:
    engine = f", engine {config.engine}" if config.engine else ""
    return f"{config.name}: {len(config.configs)} patterns{engine}"


def _legend(rows: Iterable[SupportRow]) -> dict[str, str]:
    """Dtype config → its letter, in order of first use."""
    texts = dict.fromkeys(text for row in rows for text in row.dtypes)
    return {text: _letter(index) for index, text in enumerate(texts)}


def _letter(index: int) -> str:
    """A … Z, then A2 … Z2, and so on."""
    turn, position = divmod(index, len(_LETTERS))
    return _LETTERS[position] + (str(turn + 1) if turn else "")


def _cells(row: SupportRow, legend: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """The cells in the order of ``COLUMNS``, with letters for dtypes."""
    for name in COLUMNS:
        cell = getattr(row, name)
        if name == "dtypes":
            yield (", ".join(legend[text] for text in cell),)
        else:
            yield (", ".join(cell),) if name == "modes" else cell


def _row(entry: BackendPatternConfig) -> SupportRow:
    configs = entry.dtype_configs
    return SupportRow(
        operators=(describe_entry(entry),),
        modes=tuple(dict.fromkeys(map(mode_of, configs))),
        dtypes=tuple(_dtypes(config, entry) for config in configs),
        per_channel=_per_channel(entry),
        fused_as=_name(entry.fused_module),
        qat=_name(entry.qat_module),
        reference=_name(entry.reference_quantized_module),
        observation=_observation(entry),
    )


def _dtypes(config: DTypeConfig, entry: BackendPatternConfig) -> str:
    where = "" if entry.where is None else f", where {entry.where}"
    return f"{mode_of(config)}: {describe_dtype_config(config)}{where}"


def _name(module: Any) -> tuple[str, ...]:
    return () if module is None else (operator_label(module),)


_CHANNELS = {None: "yes", "per_tensor": "no", "per_channel": "only"}


def _per_channel(entry: BackendPatternConfig) -> tuple[str, ...]:
    """What the weight constraints say; unconstrained weights may be quantized per channel."""
    words: dict[str, None] = {}
    for config in entry.dtype_configs:
        weight = config.weight_dtype_with_constraints
        if weight.dtype is None or (weight.dtype.is_floating_point and weight.dtype.itemsize > 1):
            continue
        word = _CHANNELS.get(weight.granularity) or Granularity.parse(str(weight.granularity)).words
        axis = "" if weight.ch_axis is None else f", axis {weight.ch_axis}"
        words[word + axis] = None
    return tuple(words)


def _observation(entry: BackendPatternConfig) -> tuple[str, ...]:
    counts = entry._num_tensor_args_to_observation_type
    if not counts:
        return (_OBSERVATIONS[entry.observation_type],)
    return tuple(
        f"{count} tensor{'' if count == 1 else 's'}: {_OBSERVATIONS[kind]}"
        for count, kind in sorted(counts.items())
    )


def default_lines(config: BackendConfig) -> list[str]:
    """What the backend observes and quantizes with by default; one line per role and override."""
    defaults = config.defaults
    if defaults is None:
        return []
    lines = _roles(defaults)
    for override in defaults.overrides:
        names = ", ".join(map(operator_label, override.operators))
        where = " between float operators" if override.between_float_operators else ""
        lines.append(f"{names}{where} – {'; '.join(_roles(override)) or 'nothing of their own'}")
    return lines + list(map(_left_float, defaults.leave_float))


def _roles(record: BackendDefaults | DefaultOverride) -> list[str]:
    return [f"{role.replace('qat_', 'training, ')}: {v}" for role, v in record.roles().items()]


def _left_float(rule: LeaveFloat) -> str:
    operators = ", ".join(map(operator_label, rule.operators))
    return f"{operators} – float {', '.join(phrases(rule))}"


def qdq_lines(config: BackendConfig) -> list[str]:
    """The backend's rules for quantize and dequantize nodes that are not the default; one line each.

    >>> from backquant.backend_config import QDQRules
    >>> qdq_lines(BackendConfig("mine").set_qdq(QDQRules(quantize_constants=False)))
    ['quantize_constants: False']
    """
    if config.qdq is None:
        return []
    lines = [
        f"{field.name}: {value if isinstance(value, str) else field.kind.words(value)}"
        for field, value in set_fields(config.qdq)
        if field.name != "leave_float"
    ]
    return lines + [f"leave_float: {_left_float(rule)}" for rule in config.qdq.leave_float]


def slower_lines(config: BackendConfig) -> list[str]:
    """What the backend knows to be slower on integers, one line each.

    >>> from backquant.backend_config import KnownSlower
    >>> small = KnownSlower(("lstm",), {"hidden_size": {"max": 63}}, "20 steps", 20.0, 18.0)
    >>> slower_lines(BackendConfig("mine").set_slower([small]))
    ['lstm where hidden_size ≤ 63 – 20 steps: 20 µs on integers, 18 in float']
    """
    return [
        f"{', '.join(record.operators)} where {record.condition} – {record.measured}: "
        f"{record.integer_us:g} µs on integers, {record.float_us:g} in float"
        for record in config.slower
    ]


def to_text(config: BackendConfig) -> Group:
    """The table for a terminal, with its legend: something ``rich.print`` shows.

    The modules share one column, ``becomes``, so that it fits into 100 characters.

    >>> from rich.console import Console
    >>> Console(width=80).print(to_text(BackendConfig("mine")).renderables[0])
    mine: 0 patterns
    """
    rows = support_rows(config)
    legend = _legend(rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, width in _TEXT_COLUMNS.items():
        table.add_column(Text(heading), overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*(Text("\n".join(cell)) for cell in _text_cells(row, legend)))
    lines = [Text(f"{letter}  {text}") for text, letter in legend.items()]
    return Group(Text(_title(config)), *lines, table)


def _text_cells(row: SupportRow, legend: dict[str, str]) -> Iterator[tuple[str, ...]]:
    modules = (("fused", row.fused_as), ("QAT", row.qat), ("ref.", row.reference))
    yield row.operators
    yield row.modes
    yield (" ".join(legend[text] for text in row.dtypes),)
    yield row.per_channel
    yield tuple(f"{label} {name}" for label, names in modules for name in names)
    yield row.observation


def to_markdown(config: BackendConfig) -> str:
    """Legend and table in Markdown (GitHub's form), without a heading.

    >>> print(to_markdown(BackendConfig("mine")).splitlines()[0])
    | operators | quantization | dtypes | per channel | fused as | QAT | reference | output qparams |
    """
    rows = support_rows(config)
    legend = _legend(rows)
    lines = [f"- **{letter}** {markdown(text)}" for text, letter in legend.items()]
    lines += [""] if lines else []
    lines += [_markdown_row(COLUMNS.values()), _markdown_row("---" for _ in COLUMNS)]
    for row in rows:
        cells = ("<br>".join(map(markdown, cell)) for cell in _cells(row, legend))
        lines.append(_markdown_row(cells))
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def to_html(config: BackendConfig) -> str:
    """Legend and table as an HTML fragment (``<div class="backquant-support">``), texts escaped.

    >>> "&lt;b&gt;" in to_html(BackendConfig("<b>"))
    True
    """
    rows = support_rows(config)
    legend = _legend(rows)
    terms = (
        part for text, letter in legend.items() for part in (tag("dt", letter), tag("dd", text))
    )
    lines = (
        tag("tr", *(tag("td", *_on_lines(cell)) for cell in _cells(row, legend))) for row in rows
    )
    support = table(
        (tag("th", name, scope="col") for name in COLUMNS.values()), lines, _title(config)
    )
    return "".join(tag("div", tag("dl", *terms), support, class_="backquant-support").written())


def _on_lines(texts: Iterable[str]) -> Iterator[Child]:
    for at, text in enumerate(texts):
        yield from (tag("br"), text) if at else (text,)
