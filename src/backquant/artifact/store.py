"""``save``, ``load`` and ``describe``: what a quantized model's file holds."""

from __future__ import annotations

import importlib
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backquant.artifact.file import ManifestText, read_file, read_text, readable, write_file
from backquant.artifact.functions import find_defined, is_within
from backquant.artifact.json_values import Decoder, Encoder, torch_constant
from backquant.artifact.manifest import check_manifest
from backquant.artifact.modules import ModuleDecoder, ModuleEncoder
from backquant.artifact.reference import decode_reference, encode_reference
from backquant.artifact.tensors import TensorReader, TensorWriter
from backquant.backend_config import BackendConfig, files
from backquant.dtypes import QParams
from backquant.errors import ArtifactError, UsageError
from backquant.graph.example import ExampleSpec
from backquant.graph.export import Interface, Maker, Structure
from backquant.graph.objects import Shell
from backquant.json_text import plain_data, read_json
from backquant.lower import EngineInfo, KernelUse, engine_here
from backquant.match.plan import Plan, Reason
from backquant.qconfig import QConfigMapping
from backquant.report.model import Report
from backquant.report.recorded import StoredReport
from backquant.runtime import LoweredRecord, QuantizedModel
from backquant.runtime.checkpointed import Origin
from backquant.version import __version__


def save(model: QuantizedModel, path: str | os.PathLike[str], *, allow: Sequence[str] = ()) -> None:
    """Write a quantized model to one file: tensors, graph, spec, plan, qparams, engine, report.

    The file is a safetensors file with a JSON document in its metadata; it holds no pickle, and is
    written under a temporary name first.

    Args:
        model: from ``quantize`` or ``convert_fx``.
        path: the file; its folder must exist.
        allow: packages besides torch and backquant whose classes and functions may be named in it;
            ``load`` must then allow them too.

    Raises:
        ArtifactError: the model holds something that cannot be stored (named), or no such folder.
        UsageError: the model was changed by hand after it was quantized.

    >>> import tempfile
    >>> import backquant
    >>> model = backquant.quantize(torch.nn.Linear(4, 4), calibration=[torch.randn(8, 4)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, f"{folder}/model.bq")
    ...     loaded = read_model(f"{folder}/model.bq")
    >>> x = torch.randn(2, 4)
    >>> torch.equal(loaded(x), model(x))
    True
    """
    if not isinstance(model, QuantizedModel):
        raise UsageError(
            f"{type(model).__name__} is not a quantized model",
            where="backquant.save",
            fix="backquant.save(backquant.quantize(model, ...), path)",
        )
    write_model(model, path, TensorWriter(), allow)


def write_model(
    model: QuantizedModel, path: str | os.PathLike[str], writer: TensorWriter, allow: Sequence[str]
) -> None:
    """``save`` with a writer of its own."""
    model.check_unedited("backquant.save")
    encoder = Encoder(writer.add, allow)
    report = model.report
    document = {
        "versions": {"backquant": __version__, "torch": torch.__version__},
        "engine": None if model.engine is None else model.engine.to_dict(),
        "kernels": [{**asdict(use), "dtype": str(use.dtype)[6:]} for use in model.kernels],
        "left_in_float": [asdict(reason) for reason in model.left_in_float],
        "inputs": [[index, *_literals(q)] for index, q in model.input_qparams.items()],
        "outputs": [[label, *_literals(q)] for label, q in model.output_qparams.items()],
        "example": None if model.example is None else model.example.to_dict(),
        "backend": _spec(model.backend_config),
        "plan": model.plan.to_dict(),
        "interface": _interface(model, encoder),
        "report": None if report is None else report.to_dict(),
        "model": ModuleEncoder(encoder).encode(model.graph_module),
        "strides": writer.strides,
        "packed": writer.packed,
    }
    if reference := encode_reference(model, encoder, writer):
        document["reference"] = reference
    if measured := model.record.measured_outputs:
        document["measured_outputs"] = [[label, *_literals(q)] for label, q in measured.items()]
    if not model.check_finite:
        document["check_finite"] = False
    write_file(path, document, writer.tensors)


def _interface(model: QuantizedModel, encoder: Encoder) -> dict[str, Any] | None:
    if model.interface is None:
        return None
    data = model.interface.to_dict()
    encode_records(model.interface.output, data["output"], encoder)
    return data


def _spec(config: BackendConfig) -> dict[str, str]:
    """The description as JSON text; one that names callables without an import path, by name only."""
    try:
        return {"name": config.name, "spec": files.dumps(config, "json")}
    except ValueError as error:
        return {"name": config.name, "unstored": str(error)}


def _literals(qparams: QParams) -> list[Any]:
    *numbers, dtype = qparams.literals
    return [*numbers, str(dtype).removeprefix("torch.")]


def read_model(
    path: str | os.PathLike[str], *, allow: Sequence[str] = (), verify: bool = True
) -> QuantizedModel:
    """``backquant.load``, but that the model cannot be lowered again, which ``load_state_dict`` needs.

    Raises what that raises.
    """
    document, tensors = read_file(path, verify=verify)
    with readable(path):
        model = _model(document, tensors, tuple(allow))
    model.source = str(path)
    return model


def _model(
    document: dict[str, Any], tensors: dict[str, torch.Tensor], allow: tuple[str, ...]
) -> QuantizedModel:
    engine = _engine(document)
    decoder = Decoder(
        TensorReader(tensors, document["strides"], document.get("packed")), allow=allow
    )
    graph_module = ModuleDecoder(decoder).decode(document["model"])
    if not isinstance(graph_module, torch.fx.GraphModule):
        raise TypeError("the model is no graph")
    example, report = document.get("example"), document["report"]
    record = LoweredRecord(
        plan=Plan.from_dict(document["plan"]),
        backend_config=_config(document["backend"], allow),
        qconfig_mapping=QConfigMapping(),  # not in the file: the plan has the rules that counted
        engine=engine,
        kernels=tuple(_kernel(use) for use in document["kernels"]),
        left_in_float=tuple(Reason(**reason) for reason in document["left_in_float"]),
        inputs=dict(map(_qparams, document.get("inputs", ()))),
        outputs=dict(map(_qparams, document.get("outputs", ()))),
        measured_outputs=dict(map(_qparams, document.get("measured_outputs", ()))),
        example=None if example is None else ExampleSpec(**example),
        interface=_read_interface(document.get("interface"), decoder),
        report_of=None if report is None else StoredReport(Report.from_dict(report)),
    )
    origin = None
    if stored := document.get("reference"):
        origin = Origin(decode_reference(stored, decoder, record), None)
    model = QuantizedModel(graph_module, record, origin)
    model.check_finite = document.get("check_finite", True)
    return model


def _read_interface(stored: dict[str, Any] | None, decoder: Decoder) -> Interface | None:
    if stored is None:
        return None
    read = Interface.from_dict(stored)
    return replace(read, output=decode_records(read.output, stored["output"], decoder))


def _engine(document: dict[str, Any]) -> EngineInfo | None:
    """The engine on this machine, checked against the one that the file was made for."""
    if document["engine"] is None:
        return None
    return engine_here(EngineInfo.from_dict(document["engine"]))


def _config(stored: dict[str, str], allow: tuple[str, ...]) -> BackendConfig:
    if "spec" not in stored:
        return BackendConfig(stored["name"])
    if "extends" in read_json(stored["spec"]):
        raise ArtifactError(
            "the description inside of an artifact extends another file",
            where="backend",
            fix="do not load this file: save writes descriptions whole",
        )
    # single operators are no packages, and a description names torch's as they are
    packages = tuple(name for name in allow if not name.startswith("torch.ops."))
    return files.loads(stored["spec"], "json", file="backend", allow=packages)


def _kernel(stored: dict[str, Any]) -> KernelUse:
    dtype = torch_constant(stored["dtype"], torch.dtype)
    return KernelUse(tuple(stored["nodes"]), stored["kernel"], dtype, stored["engine"])


def _qparams(stored: list[Any]) -> tuple[Any, QParams]:
    label, scale, zero_point, low, high, dtype = stored
    token = torch_constant(dtype, torch.dtype)
    return label, QParams(float(scale), int(zero_point), int(low), int(high), token)


def digest(path: str | os.PathLike[str]) -> str:
    """The SHA-256 digest of a saved model, for signatures and lists of known files.

    It covers the manifest, which holds the digests of all tensors; ``load`` refuses a file if one of them
    differs. Raises ``ArtifactError`` as ``load`` does.

    >>> import tempfile
    >>> import backquant
    >>> model = backquant.quantize(torch.nn.Linear(4, 4), calibration=[torch.randn(8, 4)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, f"{folder}/model.bq")
    ...     digest(f"{folder}/model.bq")
    'sha256:...'
    """
    return _named(read_text(path))


def _named(text: ManifestText) -> str:
    return f"sha256:{text.sha256}"


@dataclass(frozen=True)
class Description:
    """What a file says about itself; made without reading a tensor."""

    path: str
    digest: str
    versions: dict[str, str]
    engine: EngineInfo | None
    backend: str
    kernels: dict[str, int]
    report: Report

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data."""
        return {**plain_data(self), "report": self.report.to_dict()}

    def render(self) -> str:
        """What a person reads on a terminal, before the report."""
        engine = "reference model" if self.engine is None else self.engine.describe()
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"{self.path}: {self.backend} on {engine}, written by {versions}"]
        lines += [f"  {self.digest}"]
        lines += [f"  {count:4d} × {kernel}" for kernel, count in self.kernels.items()]
        return "\n".join(lines)


def describe(path: str | os.PathLike[str]) -> Description:
    """Describe a saved model without reading its tensors. Raises ``ArtifactError`` as ``load`` does."""
    text = read_text(path)
    with readable(path):
        return _description(str(path), _named(text), check_manifest(text.manifest))


def _description(path: str, name: str, document: dict[str, Any]) -> Description:
    kernels: dict[str, int] = {}
    for use in document["kernels"]:
        kernels[use["kernel"]] = kernels.get(use["kernel"], 0) + 1
    stored = document["report"]
    return Description(
        path=path,
        digest=name,
        versions=document["versions"],
        engine=None if document["engine"] is None else EngineInfo.from_dict(document["engine"]),
        backend=document["backend"]["name"],
        kernels=dict(sorted(kernels.items(), key=lambda item: -item[1])),
        report=Report(document["backend"]["name"]) if stored is None else Report.from_dict(stored),
    )


# The classes that an exported model returns: by name in the file, made again where that is safe.
#
# A file loads without anybody's code, and gives an ``OutputRecord`` in place of a class it does not know. The
# classes of outputs and caches of ``transformers`` it does know: they are imported when a file that names
# them is loaded, and ``transformers`` is installed. So are classes of packages that are allowed. An
# output class is called with its fields; of any other an empty object is made, and its attributes are
# set: no code of a file runs, and no ``__init__`` but that of ``ModelOutput``.

# Modules of transformers that define outputs and caches, and do nothing when they are imported.
_KNOWN = re.compile(r"transformers\.(modeling_outputs|cache_utils|models\.\w+\.modeling_\w+)\.\w+")

_ORDERED = "collections.OrderedDict"


def encode_records(structure: Structure, data: dict[str, Any], encoder: Encoder) -> None:
    """Add to ``data``, the JSON form of ``structure``, what is needed to make its records again.

    >>> data = Structure("value").to_dict()
    >>> encode_records(Structure("value"), data, Encoder(lambda tensor: ""))
    >>> data
    {'kind': 'value'}
    """
    for part, inner in zip(structure.parts, data.get("parts", ()), strict=True):
        encode_records(part, inner, encoder)
    shell = getattr(structure.make, "context", None)
    if structure.kind != "record" or not _is_known(structure.name, encoder.allow):
        return
    if not isinstance(shell, Shell):
        data["made"] = "called"
        return
    try:
        data["made"] = {name: _encode(value, encoder) for name, value in shell.rest.items()}
    except ArtifactError:  # attributes that no file can hold: it comes back as an OutputRecord
        return


def _encode(value: Any, encoder: Encoder) -> Any:
    if isinstance(value, type):
        path = f"{value.__module__}.{value.__qualname__}"
        if not _is_known(path, encoder.allow):
            raise ArtifactError("a class that is not known", where=path)
        return {"record_class": path}
    return encoder.encode(value, "an output")


def decode_records(structure: Structure, data: Mapping[str, Any], decoder: Decoder) -> Structure:
    """``structure``, which was read from ``data``, with records that can be made again."""
    parts = tuple(
        decode_records(part, inner, decoder)
        for part, inner in zip(structure.parts, data.get("parts", ()), strict=True)
    )
    structure = replace(structure, parts=parts)
    if structure.kind != "record" or "made" not in data:
        return structure
    cls = _found(structure.name, decoder.allow)
    if cls is None:
        return structure
    if data["made"] == "called":
        is_output = cls in pytree.SUPPORTED_NODES and hasattr(cls, "to_tuple")
        is_output = is_output or cls is OrderedDict
        is_named = issubclass(cls, tuple) and getattr(cls, "_fields", None) == structure.keys
        good = is_output or is_named
        return replace(structure, make=Maker(cls, list(structure.keys))) if good else structure
    rest = {str(name): _decode(value, decoder) for name, value in data["made"].items()}
    if any(name.startswith("__") or callable(getattr(cls, name, None)) for name in rest):
        raise ArtifactError("an attribute of an output hides a method", where=structure.name)
    if not all(isinstance(name, str) for name in structure.keys):
        raise ArtifactError("the attributes of an output have no names", where=structure.name)
    return replace(structure, make=Maker(cls, Shell(cls, structure.keys, rest)))


def _decode(value: Any, decoder: Decoder) -> Any:
    if isinstance(value, dict) and list(value) == ["record_class"]:
        return _found(value["record_class"], decoder.allow)
    return decoder.decode(value)


def _is_known(path: str, allow: Sequence[str]) -> bool:
    return path == _ORDERED or bool(_KNOWN.fullmatch(path)) or is_within(path, allow)


def _found(path: str, allow: Sequence[str]) -> type | None:
    """The class, if it is known and its package is installed."""
    if not isinstance(path, str) or not _is_known(path, allow):
        return None
    if path == _ORDERED:
        return OrderedDict
    try:
        importlib.import_module(path.split(".", maxsplit=1)[0])
        found = find_defined(path, "class")
    except (ImportError, ArtifactError):
        return None
    is_plain = isinstance(found, type) and found.__new__ in (object.__new__, dict.__new__)
    is_tuple = isinstance(found, type) and issubclass(found, tuple)
    is_output = isinstance(found, type) and hasattr(found, "to_tuple")
    return found if is_plain or is_tuple or is_output else None
