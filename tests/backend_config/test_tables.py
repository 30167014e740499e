from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
import torch

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DefaultOverride,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
    QuantDefault,
    get_backend_config,
    list_backends,
)
from backquant.backend_config.derived import (
    default_lines,
    document_of,
    support_rows,
)
from backquant.backend_config.describe import describe_pattern
from backquant.pages.html import to_html
from backquant.pages.text import render, to_markdown

WEIGHTED = DTypeConfig(torch.quint8, torch.quint8, torch.qint8)
PER_TENSOR = DTypeConfig(
    torch.quint8, torch.quint8, DTypeWithConstraints(torch.qint8, granularity="per_tensor")
)
PER_CHANNEL = DTypeConfig(
    torch.quint8,
    torch.quint8,
    DTypeWithConstraints(torch.qint8, granularity="per_channel", ch_axis=0),
)


def backend(*entries: BackendPatternConfig) -> BackendConfig:
    return BackendConfig("mine").set_backend_pattern_configs(entries)


@pytest.mark.parametrize("name", list_backends())
def test_every_pattern_is_in_every_form(name):
    config = get_backend_config(name)
    patterns = [describe_pattern(pattern) for pattern in config.entries]
    rows = support_rows(config)
    assert [text for row in rows for text in row.operators] == patterns
    shown = document_of(config)
    text, markdown, page = render(shown, width=220), to_markdown(shown), to_html(shown)
    for pattern in patterns:
        assert pattern in text
        assert pattern.replace("_", "\\_").replace("*", "\\*") in markdown
        assert pattern in page


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ([WEIGHTED], ("yes",)),
        ([PER_TENSOR], ("no",)),
        ([PER_CHANNEL], ("only, axis 0",)),
        ([WEIGHTED, PER_TENSOR], ("yes", "no")),
        ([DTypeConfig(torch.quint8, torch.quint8)], ()),
        ([DTypeConfig(torch.float16, torch.float, torch.float16)], ()),
    ],
)
def test_per_channel(configs, expected):
    [row] = support_rows(backend(BackendPatternConfig(torch.add).set_dtype_configs(configs)))
    assert row.per_channel == expected


def test_observation_by_number_of_tensors():
    entry = BackendPatternConfig(torch.add)._set_num_tensor_args_to_observation_type(
        {2: ObservationType(0), 1: ObservationType(1), 0: ObservationType(2)}
    )
    [row] = support_rows(backend(entry))
    assert row.observation == ("0 tensors: none", "1 tensor: shared", "2 tensors: own")


def test_modules():
    entry = (
        BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU))
        .set_fused_module(torch.nn.Sequential)
        .set_qat_module(torch.nn.Linear)
        .set_reference_quantized_module(torch.nn.Identity)
    )
    [row] = support_rows(backend(entry))
    assert (row.fused_as, row.qat, row.reference) == (
        ("nn.Sequential",),
        ("nn.Linear",),
        ("nn.Identity",),
    )


def test_rows_that_differ_stay_apart():
    entries = [
        BackendPatternConfig(torch.add).add_dtype_config(WEIGHTED),
        BackendPatternConfig(torch.mul).add_dtype_config(PER_TENSOR),
        BackendPatternConfig(torch.sub).add_dtype_config(PER_TENSOR),
    ]
    rows = support_rows(backend(*entries))
    assert [row.operators for row in rows] == [("torch.add",), ("torch.mul", "torch.sub")]


def test_more_dtype_configs_than_letters():
    configs = [
        DTypeConfig(DTypeWithConstraints(torch.quint8, quant_max_upper_bound=bound))
        for bound in range(60)
    ]
    entry = BackendPatternConfig(torch.add).set_dtype_configs(configs)
    lines = to_markdown(document_of(backend(entry))).splitlines()
    letters = [line.split()[1] for line in lines if line.startswith("- ") and "static" in line]
    assert (letters[0], letters[25], letters[26], letters[52]) == ("A", "Z", "A2", "A3")
    assert len(set(letters)) == 60
    assert " ".join(letters) in lines[-1]


def test_markdown_has_one_cell_per_column_and_no_markup_from_names():
    entries = [BackendPatternConfig("a|b"), BackendPatternConfig("<b>*x*</b>")]
    lines = to_markdown(document_of(backend(*entries))).splitlines()
    assert lines[-1].count(" | ") == lines[-2].count(" | ") == 1
    assert "a\\|b" in lines[-1]
    assert "&lt;b&gt;\\*x\\*&lt;/b&gt;" in lines[-1]


class Reader(HTMLParser):
    """Checks that tags are balanced, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in ("br", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_balanced_and_escaped():
    name = '<script>alert("x")</script>'
    config = backend(BackendPatternConfig(name), BackendPatternConfig(torch.add)).set_name(name)
    text = to_html(document_of(config))
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert "script" not in reader.counts
    assert reader.counts["td"] == reader.counts["th"] * (reader.counts["tr"] - 1)


def test_text_is_not_markup():
    assert "[red]x[/red]" in render(document_of(backend(BackendPatternConfig("[red]x[/red]"))))


def test_default_lines():
    minmax = QuantDefault("minmax", dtype=torch.quint8)
    override = DefaultOverride((torch.nn.Linear, "view"), qat_weight=minmax)
    config = backend().set_defaults(BackendDefaults(minmax, minmax, minmax, overrides=(override,)))
    assert default_lines(config) == [
        "activation: minmax, quint8",
        "weight: minmax, quint8",
        "training, activation: minmax, quint8",
        "nn.Linear, .view() – training, weight: minmax, quint8",
    ]


def test_rows_are_json():
    [row] = support_rows(backend(BackendPatternConfig(torch.add).add_dtype_config(WEIGHTED)))
    assert json.loads(json.dumps(row.to_dict())) == {
        "operators": ["torch.add"],
        "modes": ["static"],
        "dtypes": ["static: quint8 × qint8 → quint8"],
        "per_channel": ["yes"],
        "fused_as": [],
        "qat": [],
        "reference": [],
        "observation": ["own"],
    }
