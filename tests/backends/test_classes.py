"""Every class that a backend names constructs, runs and converts; none is a placeholder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import (
    BackendPatternConfig,
    MatchAllNode,
    get_backend_config,
    list_backends,
    short_name,
)
from backquant.errors import ConfigError
from backquant.nn import intrinsic
from backquant.observe import (
    default_embedding_fake_quant,
    default_per_channel_weight_fake_quant,
    default_weight_observer,
)
from backquant.operators import find_root, module_for_call

CHANNELS = 4


def _all_entries() -> list[BackendPatternConfig]:
    entries: dict[Any, BackendPatternConfig] = {}
    for name in list_backends():
        for config in get_backend_config(name).configs:
            entries.setdefault((config.normal_pattern, config.qat_module), config)
    return list(entries.values())


ENTRIES = _all_entries()


def _ids(configs: list[BackendPatternConfig]) -> list[Any]:
    return [pytest.param(c, id=str(c.normal_pattern)) for c in configs]


def _classes(field: str) -> list[Any]:
    classes = {getattr(c, field) for c in ENTRIES} - {None}
    return sorted(classes, key=lambda cls: f"{cls.__module__}.{cls.__name__}")


def _dimension(op: Any) -> int:
    digits = [c for c in getattr(op, "__name__", "") if c in "123"]
    return int(digits[-1]) if digits else 0


def _part(op: Any) -> Any:
    """A module for one operator of a fusion pattern; all take and give ``CHANNELS`` channels."""
    name = op.__name__ if isinstance(op, type) else ""
    if name.startswith("Conv"):
        return op(CHANNELS, CHANNELS, 3, padding=1)
    if name == "Linear":
        return op(CHANNELS, CHANNELS)
    if name.startswith("BatchNorm"):
        norm = op(CHANNELS)
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.5, 0.5)
        norm.running_mean.uniform_(-0.5, 0.5)
        norm.running_var.uniform_(0.5, 1.5)
        return norm
    if isinstance(op, type) and op is not MatchAllNode:
        return op()
    # functional tails become modules; an addition stays a function
    return module_for_call(op, (), {}) or op


def _input(config: BackendPatternConfig) -> torch.Tensor:
    dimension = max(_dimension(node.op) for node in config.normal_pattern.nodes)
    has_linear = any(node.op is nn.Linear for node in config.normal_pattern.nodes)
    return torch.randn(3, CHANNELS, *([] if has_linear else [6] * dimension))


def _parts_of(pattern: Any) -> Any:
    return tuple(map(_parts_of, pattern)) if isinstance(pattern, tuple) else _part(pattern)


def _run(parts: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A reversed nested pattern of modules, evaluated: ``(last, *its inputs)``."""
    if not isinstance(parts, tuple):
        return y if isinstance(parts, MatchAllNode) else parts(x)
    last, *inputs = parts
    if len(inputs) == 1:
        return last(_run(inputs[0], x, y))
    return last(*(_run(i, x, y) if not isinstance(i, type) else y for i in inputs))


def _nested(forward: tuple[Any, ...]) -> Any:
    nested = forward[0]
    for part in forward[1:]:
        nested = (part, nested)
    return nested


def _modules(parts: Any) -> list[nn.Module]:
    if isinstance(parts, tuple):
        return [m for part in parts for m in _modules(part)]
    return [parts] if isinstance(parts, nn.Module) else []


def _built(config: BackendPatternConfig, training: bool) -> tuple[Any, Any]:
    """The parts as the fuser takes them, and nested for ``_run``."""
    is_reversed = config._pattern_complex_format is not None
    parts = _parts_of(config._pattern_complex_format if is_reversed else config.pattern)
    for module in _modules(parts):
        module.train(training)
    return parts, (parts if is_reversed else _nested(parts))


FUSIONS = [c for c in ENTRIES if c.fuser_method is not None]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("config", _ids(FUSIONS))
def test_fused_for_inference_computes_what_its_parts_do(config: BackendPatternConfig) -> None:
    fuser = config.fuser_method
    assert fuser is not None
    parts, nested = _built(config, training=False)
    x = _input(config)
    y = torch.randn_like(x)
    with torch.no_grad():
        expected = _run(nested, x, y)
        fused = fuser(False, *parts)
        is_addition = isinstance(fused, (intrinsic.ConvAdd2d, intrinsic.ConvAddReLU2d))
        result = fused(x, y) if is_addition else fused(x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert not fused.training


def _has_training_form(config: BackendPatternConfig) -> bool:
    ops = [node.op for node in config.normal_pattern.nodes]
    names = {op.__name__ for op in ops if isinstance(op, type)}
    if any(name.startswith("ConvTranspose") for name in names):
        return False
    with_norm = any(name.startswith("BatchNorm") for name in names)
    return not (with_norm and ("LeakyReLU" in names or MatchAllNode in ops))


@pytest.mark.parametrize("config", _ids(FUSIONS))
def test_fused_for_training_is_the_named_module_or_refused(config: BackendPatternConfig) -> None:
    fuser = config.fuser_method
    assert fuser is not None
    parts, _ = _built(config, training=True)
    if not _has_training_form(config):
        with pytest.raises(ConfigError) as error:
            fuser(True, *parts)
        assert error.value.fix
        return
    fused = fuser(True, *parts)
    assert type(fused) is config.fused_module
    assert fused.training


def _float_module(pattern: type[nn.Module]) -> nn.Module:
    """A float instance of a pattern that names a QAT module: an operator, or a fused module."""
    root = find_root(pattern)
    assert root is not None
    if pattern in root.modules:
        return root.example_of(pattern).module
    [config, *_] = [
        c
        for c in FUSIONS
        if c.fused_module is pattern and all(isinstance(op, type) for op in c.pattern or [None])
    ]
    parts, _ = _built(config, training=True)
    assert config.fuser_method is not None
    fused: nn.Module = config.fuser_method(True, *parts)
    return fused


QAT = [c for c in ENTRIES if c.qat_module is not None]


@pytest.mark.parametrize("config", _ids(QAT))
def test_qat_module_converts_from_float_and_back(config: BackendPatternConfig) -> None:
    assert config.qat_module is not None
    module = _float_module(config.pattern)
    is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    weight = default_embedding_fake_quant if is_table else default_per_channel_weight_fake_quant
    module.qconfig = SimpleNamespace(activation=nn.Identity, weight=weight)
    module.train()
    converted = config.qat_module.from_float(module)
    assert type(converted) is config.qat_module
    assert converted.training

    record = find_root(config.pattern)
    assert record is not None
    inputs = record.example().inputs if config.pattern in record.modules else (_input_for(record),)
    with torch.no_grad():
        expected, result = module.eval()(*inputs), converted.eval()(*inputs)
        assert result.shape == expected.shape
        torch.testing.assert_close(result, expected, rtol=0.1, atol=0.1)
        assert not torch.equal(result, expected)  # the weight was fake-quantized
        back = converted.to_float().eval()(*inputs)
    torch.testing.assert_close(back, expected, rtol=1e-4, atol=1e-4)


def _input_for(record: Any) -> torch.Tensor:
    dimension = _dimension(record.modules[0])
    return torch.randn(3, CHANNELS, *[6] * dimension)


def _qparams(weight: torch.Tensor) -> dict[str, Any]:
    observer = default_weight_observer()
    observer(weight)
    scale, zero_point = observer.calculate_qparams()
    return {
        "qscheme": torch.per_tensor_affine,
        "dtype": torch.qint8,
        "scale": scale,
        "zero_point": zero_point,
    }


ROOTS = sorted(
    {
        (c.root_module, c.reference_quantized_module)
        for c in ENTRIES
        if c.root_module is not None and c.reference_quantized_module is not None
    },
    key=lambda pair: pair[0].__name__,
)


@pytest.mark.parametrize(("root", "reference"), ROOTS, ids=short_name)
def test_reference_module_converts_from_float(root: Any, reference: Any) -> None:
    record = find_root(root)
    assert record is not None
    assert record.reference is reference
    module, inputs = record.example_of(root)
    weights = {n: p for n, p in module.named_parameters() if n.startswith("weight")}
    if set(weights) == {"weight"}:
        converted = reference.from_float(module, _qparams(weights["weight"]))
    else:
        converted = reference.from_float(module, {n: _qparams(w) for n, w in weights.items()})
    assert type(converted) is reference
    with torch.no_grad():
        expected, result = module(*inputs), converted(*inputs)
    while isinstance(expected, tuple):
        expected, result = expected[0], result[0]
    assert result.shape == expected.shape
    torch.testing.assert_close(result, expected, rtol=0.1, atol=0.1)
    assert not torch.equal(result, expected)
    stored = [b for n, b in converted.named_buffers() if n.endswith(tuple(weights))]
    assert [b.dtype for b in stored] == [torch.int8] * len(weights)


def test_every_class_of_every_entry_is_tested_above() -> None:
    """What patterns and fields name is an operator, a fused, a QAT or a reference module."""
    tested = {c.fused_module for c in FUSIONS} | {c.qat_module for c in QAT}
    tested |= {reference for _, reference in ROOTS}
    for config in ENTRIES:
        fields = (config.root_module, config.qat_module, config.reference_quantized_module)
        nodes = [node.op for node in config.normal_pattern.nodes]
        for cls in (*fields, config.fused_module, *nodes):
            if not isinstance(cls, type) or cls is MatchAllNode:
                continue
            record = find_root(cls)
            assert record is not None, cls
            assert cls in tested or cls in record.modules, cls


def test_functional_tail_keeps_its_settings() -> None:
    """``F.leaky_relu(linear(x), 0.3)`` fused by way of ``module_for_call`` keeps the slope."""
    [config] = [
        c
        for c in get_backend_config("onednn").configs
        if c.pattern == (nn.Linear, F.leaky_relu) and c.fuser_method is not None
    ]
    assert config.fuser_method is not None
    linear, x = nn.Linear(CHANNELS, CHANNELS).eval(), torch.randn(3, CHANNELS)
    tail = module_for_call(F.leaky_relu, (0.3,), {})
    assert tail is not None
    with torch.no_grad():
        fused = config.fuser_method(False, linear, tail.eval())
        assert torch.equal(fused(x), F.leaky_relu(linear(x), 0.3))
