from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.artifact.file import manifest_text, packed, read_file
from backquant.errors import ArtifactError, EngineError, UsageError
from backquant.lower import engine as engines
from backquant.lower.engine import MachineFacts
from backquant.qconfig import PrepareCustomConfig
from backquant.runtime import QuantizedModel

Again = Callable[..., QuantizedModel]


def test_everything_comes_back(
    quantized: QuantizedModel, image: torch.Tensor, round_trip: Again
) -> None:
    loaded = round_trip(quantized)
    assert torch.equal(loaded(image), quantized(image))
    for part in ("plan", "backend_config", "engine", "kernels", "left_in_float", "report"):
        assert getattr(loaded, part) == getattr(quantized, part), part
    nodes = [(n.op, n.name, str(n.target)) for n in loaded.graph_module.graph.nodes]
    assert nodes == [(n.op, n.name, str(n.target)) for n in quantized.graph_module.graph.nodes]
    assert loaded.audit() == quantized.audit()
    assert not loaded.training
    kept = quantized.graph_module.state_dict()
    assert loaded.graph_module.state_dict().keys() == kept.keys()


def test_saving_what_was_loaded_gives_the_same_file(
    quantized: QuantizedModel, tmp_path: Path, unchanged: Any
) -> None:
    with unchanged(quantized):
        backquant.save(quantized, tmp_path / "a.bq")
    backquant.save(backquant.load(tmp_path / "a.bq"), tmp_path / "b.bq")
    assert (tmp_path / "a.bq").read_bytes() == (tmp_path / "b.bq").read_bytes()


@pytest.mark.parametrize("backend", ["x86", "onednn", "fbgemm", "qnnpack", "native", "tensorrt"])
def test_each_backend(backend: str, image: torch.Tensor, round_trip: Again) -> None:
    model = backquant.quantize(chain(), backend=backend, calibration=[image])
    loaded = round_trip(model)
    assert torch.equal(loaded(image), model(image))
    assert (loaded.engine is None) == (backend == "tensorrt")


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1),
        nn.Sigmoid(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class Nested(nn.Module):
    """Keyword inputs of several kinds; a dict of tuples as the result; a parameter used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor, batch: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        y = self.norm(self.fc(x) + self.bias) * scale
        z = batch["extra"][0] - y.mean(dim=-1, keepdim=True)
        values, indices = torch.topk(z, 2)
        return {"y": y, "rest": (values, [indices, z.shape[0]], None), "dtype": torch.float32}


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value), [bits(item) for item in value]
    return value


def test_nested_results_and_keyword_inputs(round_trip: Again) -> None:
    batch = {"x": torch.randn(5, 4), "batch": {"extra": (torch.randn(5, 4),)}}
    model = backquant.quantize(Nested(), calibration=[batch])
    loaded = round_trip(model)
    for inputs in (batch, {**batch, "scale": 0.5}):
        assert bits(loaded(**inputs)) == bits(model(**inputs))
    assert type(loaded(**batch)["rest"][1]) is list


def test_tied_and_channels_last_weights(round_trip: Again, image: torch.Tensor) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)
            self.softplus = nn.Softplus()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.softplus(self.a(self.conv(x))))

    net = Tied().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net_fc = nn.Sequential(net, nn.Conv2d(3, 3, 1))
    qconfigs = backquant.get_default_qconfig_mapping("x86").set_module_name("0", None)
    model = backquant.quantize(net_fc, calibration=[image], qconfig_mapping=qconfigs)
    loaded = round_trip(model)
    tree = dict(loaded.graph_module.named_modules())
    assert tree["0.a"].weight is tree["0.b"].weight
    assert tree["0.conv"].weight.stride() == net.conv.weight.stride()  # type: ignore[union-attr]
    assert torch.equal(loaded(image), model(image))


TORCH = str(torch.__version__).split("+", maxsplit=1)[0]
USER_CODE = """
from typing import NamedTuple
import torch
from torch import nn, fx

class Swish(nn.Module):
    def __init__(self, beta):
        super().__init__()
        self.beta = beta
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return self.fc(x) * torch.sigmoid(self.beta * x)

def double(x):
    return 2 * x if x.sum() != 0 else x
fx.wrap("double")

class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

class Leafy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.swish = nn.Linear(4, 4), Swish(2.0)
    def forward(self, x):
        return self.swish(self.fc(x))

class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        return double(self.fc(x))

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        y = self.fc(x)
        return Point(y, y)
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "bq_user_code.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(folder)
    import bq_user_code  # type: ignore[import-not-found]

    return bq_user_code


@pytest.mark.parametrize("name", ["Leafy", "Wrapped", "Named"])
def test_the_users_own_code_is_refused_by_name_or_allowed(
    name: str, user_code: Any, tmp_path: Path, round_trip: Again, snapshot: Callable[..., None]
) -> None:
    x = torch.randn(3, 4)
    custom = PrepareCustomConfig().set_non_traceable_module_names(
        ["swish"] if name == "Leafy" else []
    )
    model = backquant.quantize(
        getattr(user_code, name)(), calibration=[x], prepare_custom_config=custom
    )
    with pytest.raises(ArtifactError) as caught:
        backquant.save(model, tmp_path / "refused.bq")
    assert not (tmp_path / "refused.bq").exists()
    snapshot(f"save-{name}", caught.value)
    loaded = round_trip(model, allow=("bq_user_code",))
    assert bits(loaded(x)) == bits(model(x))
    with pytest.raises(ArtifactError) as caught:
        backquant.load(tmp_path / "model.bq")
    snapshot(f"load-{name}", caught.value)


ELSEWHERE = """
import sys
import backquant, torch
from safetensors.torch import load_file
inputs = load_file(sys.argv[2])
model = backquant.load(sys.argv[1])
assert not [name for name in sys.modules if name.startswith(("bq_", "test_store", "conftest", "tests"))]
torch.save(model(inputs["x"]), sys.argv[3])
print(model.engine.describe())
"""


def test_a_process_without_the_models_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that defines the model cannot be imported there; outputs are the same bits."""
    from safetensors.torch import save_file

    code = tmp_path / "code"
    code.mkdir()
    (code / "bq_net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)\n"
        "    def forward(self, x):\n"
        "        return torch.relu(x + self.bn(self.conv(x)))\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.stem, self.block = nn.Conv2d(3, 8, 3), Block()\n"
        "        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 4)\n"
        "    def forward(self, x):\n"
        "        y = self.norm(self.block(self.stem(x)))\n"
        "        return self.head(y.mean([2, 3]))\n"
    )
    monkeypatch.syspath_prepend(code)
    import bq_net  # type: ignore[import-not-found]

    x = torch.randn(4, 3, 8, 8)
    model = backquant.quantize(bq_net.Net(), calibration=[x])
    backquant.save(model, tmp_path / "model.bq")
    save_file({"x": x}, tmp_path / "x.safetensors")
    (tmp_path / "run.py").write_text(ELSEWHERE)
    files = [str(tmp_path / name) for name in ("run.py", "model.bq", "x.safetensors", "y.pt")]
    source = str(Path(backquant.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *files],
        check=False,
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "y.pt"), model(x))
    assert done.stdout.startswith("x86 (")


def tampered(model: QuantizedModel, path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    backquant.save(model, path)
    document, tensors = read_file(path)
    change(document)
    path.write_bytes(packed(manifest_text(document, tensors), tensors))
    return path


def test_a_malicious_file_runs_nothing(
    quantized: QuantizedModel, tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    proof = tmp_path / "proof"

    def call_system(document: dict[str, Any]) -> None:
        rows = document["model"]["graph"]
        rows[1] = {**rows[1], "target": "os.system", "args": [f"touch {proof}"], "kwargs": {}}

    path = tampered(quantized, tmp_path / "evil.bq", call_system)
    with pytest.raises(ArtifactError) as caught:
        backquant.load(path)
    snapshot("load-evil", caught.value)
    with pytest.raises(ArtifactError):
        backquant.load(path, allow=("os",))
    assert not proof.exists()


def extend(document: dict[str, Any]) -> None:
    spec = json.loads(document["backend"]["spec"])
    document["backend"]["spec"] = json.dumps({**spec, "extends": "/etc/other.yaml"})


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no model": lambda d: d.pop("model"),
    "model of another kind": lambda d: d.update(model={"class": "torch.nn.modules.linear.Linear"}),
    "a leaf in place of the graph": lambda d: d.update(
        model={"class": "torch.nn.modules.activation.ReLU", "training": False}
    ),
    "no tensor": lambda d: d["model"]["children"]["fc"]["buffers"].update(weight={"tensor": "t99"}),
    "no weight": lambda d: d["model"]["children"]["fc"]["buffers"].pop("weight"),
    "odd config": lambda d: d["model"]["children"]["fc"].update(config={"dict": [["x", 1]]}),
    "odd child": lambda d: d["model"]["children"].update(fc=3),
    "odd kernels": lambda d: d.update(kernels=[{}]),
    "odd dtype": lambda d: d["kernels"][0].update(dtype="load"),
    "odd engine": lambda d: d.update(engine={"name": "x86"}),
    "odd report": lambda d: d["report"].update(rows=[{"x": 1}]),
    "odd plan": lambda d: d.update(plan={"backend": 1}),
    "odd spec": lambda d: d["backend"].update(spec='{"schema_version": 1, "nmae": "x"}'),
    "a spec that extends": extend,
    "graph rows": lambda d: d["model"].update(graph=[{"op": "output"}]),
    "nothing": lambda d: d.clear(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_documents_are_one_kind_of_error(
    damage: str, quantized: QuantizedModel, tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    path = tampered(quantized, tmp_path / "model.bq", DAMAGES[damage])
    with pytest.raises(ArtifactError) as caught:
        backquant.load(path)
    assert "model.bq" in str(caught.value)
    snapshot(f"load-damaged-{damage.replace(' ', '-')}", caught.value)


def test_an_engine_that_this_machine_lacks(
    quantized: QuantizedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Callable[..., None],
) -> None:
    backquant.save(quantized, tmp_path / "model.bq")
    monkeypatch.setattr(
        engines, "machine_facts", lambda: MachineFacts("aarch64", torch_version=TORCH)
    )
    with pytest.raises(EngineError) as caught:
        backquant.load(tmp_path / "model.bq")
    snapshot("load-engine", caught.value)
    assert backquant.artifact.describe(tmp_path / "model.bq").engine == quantized.engine


def test_sums_that_would_saturate_here_are_refused(
    quantized: QuantizedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Callable[..., None],
) -> None:
    path = tampered(
        quantized,
        tmp_path / "model.bq",
        lambda d: d["engine"].update(wide_accumulation=True, isa="amx_int8"),
    )
    narrow = MachineFacts("x86_64", {"avx2": True}, onednn=True, torch_version=TORCH)
    monkeypatch.setattr(engines, "machine_facts", lambda: narrow)
    with pytest.raises(ArtifactError) as caught:
        backquant.load(path)
    snapshot("load-narrow", caught.value)


def test_a_description_reads_no_tensor(
    quantized: QuantizedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backquant.pages.text import render

    backquant.save(quantized, tmp_path / "model.bq")
    monkeypatch.setattr("backquant.artifact.store.read_file", None)
    description = backquant.artifact.describe(tmp_path / "model.bq")
    assert description.backend == "x86" and description.report == quantized.report
    assert sum(description.kernels.values()) == len(quantized.kernels)
    assert json.loads(json.dumps(description.to_dict()))["versions"]["torch"] == torch.__version__
    text = render(description.render(), description.report.document(), width=100)
    assert text.startswith(str(tmp_path / "model.bq")[:40])


def test_a_model_that_is_not_quantized(tmp_path: Path, snapshot: Callable[..., None]) -> None:
    with pytest.raises(UsageError) as caught:
        backquant.save(nn.Linear(2, 2), tmp_path / "x.bq")  # type: ignore[arg-type]
    snapshot("save-float", caught.value)


def test_a_description_that_cannot_be_stored_is_kept_by_name(
    quantized: QuantizedModel, round_trip: Again, image: torch.Tensor
) -> None:
    entry = backquant.BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(
        lambda *_: nn.ReLU()
    )
    quantized.backend_config.set_backend_pattern_config(entry)
    loaded = round_trip(quantized)
    assert loaded.backend_config == backquant.BackendConfig("x86")
    assert torch.equal(loaded(image), quantized(image))


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_classes_of_a_module_without_a_spec(
    round_trip: Again, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``__main__`` of a script has none."""
    script: Any = ModuleType("bq_script")
    script.Branching = type("Branching", (Branching,), {"__module__": "bq_script"})
    monkeypatch.setitem(sys.modules, "bq_script", script)
    model, x = nn.Sequential(nn.Linear(4, 4), script.Branching()), torch.randn(3, 4)
    custom = PrepareCustomConfig().set_non_traceable_module_names(["1"])
    found = backquant.quantize(
        model.eval(), calibration=[x], prepare_custom_config=custom, slower="keep"
    )
    assert bits(round_trip(found, allow=("bq_script",))(x)) == bits(found(x))


BY_HAND = {
    "backquant.save(": lambda _, n: backquant.save(
        backquant.quantize(nn.Linear(2, 2), calibration=[torch.ones(1, 2)]), n["tmp_path"] / "x.bq"
    ),
    'allow=("bq_user_code",)': lambda _, n: backquant.load(
        n["tmp_path"] / "model.bq", allow=("bq_user_code",)
    ),
}
