"""What backquant does without: names that can be imported, and say when they are used what to do instead."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from backquant.errors import LeftOutError

__all__ = ["GROUPS", "Group", "left_out"]


class Group(NamedTuple):
    """Why names are left out, and what to do instead."""

    kind: str
    why: str
    fix: str


_STATIC = (
    "prepared = backquant.prepare_fx(model, backquant.get_default_qconfig_mapping(), "
    "example_inputs); run the calibration data through it; "
    "quantized = backquant.convert_fx(prepared)"
)
_INTERNAL = (
    "say what it is needed for with the public functions, or keep torch.ao's while PyTorch has it"
)

#: By the word after ``!`` in ``names.txt``.
GROUPS: dict[str, Group] = {
    "inside": Group(
        "inside of the flow",
        "a step inside of PyTorch's prepare_fx and convert_fx; backquant's steps are others",
        "call the public function: backquant.fuse_fx, prepare_fx, prepare_qat_fx or convert_fx",
    ),
    "fusion-by-name": Group(
        "fusion by name",
        "modules are fused where the backend's description says so, not by a list of names",
        "remove the call: prepare_fx fuses by itself; to fuse only: "
        "backquant.fuse_fx(model, backend_config=...)",
    ),
    "fusers": Group(
        "fusers",
        "which function fuses a pattern is read from the backend's description",
        "get_fuser_method_mapping(backend_config) of backquant.ao.quantization.backend_config.utils; "
        "a fuser takes the modules in forward order: fuser(is_qat, conv, relu)",
    ),
    "torchscript": Group(
        "TorchScript",
        "quantization of TorchScript modules has no counterpart",
        "quantize the nn.Module that was scripted: " + _STATIC,
    ),
    "pt2e": Group(
        "PT2E",
        "the PT2E flow and its quantizers moved to torchao",
        "import it from torchao.quantization.pt2e, or use backquant.prepare_fx on the nn.Module",
    ),
    "pt2e-affine": Group(
        "PT2E",
        "part of the PT2E flow's affine quantization, which moved to torchao",
        "import it from torchao.quantization.pt2e",
    ),
    "module-tables": Group(
        "module tables",
        "which module becomes which is part of the backend's description, not of a global table",
        "get_root_module_to_quantized_reference_module(backend_config) or "
        "get_module_to_qat_module(backend_config) of backquant.ao.quantization.backend_config.utils; "
        "to change it: BackendPatternConfig(...).set_reference_quantized_module(...)",
    ),
    "dicts": Group(
        "old dicts",
        "mappings are objects since PyTorch 1.13",
        "call get_default_qconfig_mapping or get_default_qat_qconfig_mapping; .to_dict() writes one "
        "as a dict",
    ),
    "old": Group(
        "old classes",
        "QConfigDynamic has been superseded; its activation defaults to Identity",
        "QConfig(activation=default_dynamic_quant_observer, weight=...)",
    ),
    "helper": Group(
        "helpers",
        "a helper of PyTorch's implementation",
        "write it out, or keep torch.ao's while PyTorch has it",
    ),
    "quantized-modules": Group(
        "quantized modules",
        "a module of PyTorch's quantized tensors; a model of backquant runs its own kernels, on "
        "plain integer tensors",
        "build the float module and quantize it",
    ),
    "sparse": Group(
        "sparse kernels",
        "there are no kernels for sparse weights here",
        "quantize the dense module",
    ),
    "numeric-suite": Group(
        "numeric suite",
        "PyTorch's comparison of two models layer by layer has no counterpart",
        "backquant.compare(model, quantized, data) shows the error of every operator",
    ),
    "pruning": Group(
        "pruning",
        "pruning is no quantization, and stays PyTorch's",
        "import it from torch.ao.pruning, as before",
    ),
    "model-report": Group(
        "ModelReport",
        "reports are backquant's own",
        "backquant.explain(model, example_inputs, backend=...) before, quantized.report after",
    ),
    "equalization": Group(
        "equalization",
        "PyTorch's experimental equalization and bias correction have no counterpart by these names",
        'backquant.quantize(model, example_inputs, calibration=data, recipe="best")',
    ),
    "internal": Group(
        "internals",
        "a part of PyTorch's implementation, which backquant does not share",
        _INTERNAL,
    ),
}


class _LeftOut(type):
    """The class of names that are left out: they can be imported and named, and nothing else."""

    _path: str
    _group: Group

    def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> _LeftOut:
        for base in bases:
            if isinstance(base, _LeftOut):
                base._used()
        return super().__new__(cls, name, bases, members)

    def _used(cls) -> NoReturn:
        raise LeftOutError(
            f"backquant has no {cls.__name__}: {cls._group.why}",
            where=cls._path,
            fix=cls._group.fix,
        )

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:  # noqa: ARG002
        cls._used()

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        cls._used()

    def __getitem__(cls, item: object) -> NoReturn:
        cls._used()

    def __iter__(cls) -> NoReturn:
        cls._used()

    def __contains__(cls, item: object) -> NoReturn:
        cls._used()

    def __len__(cls) -> NoReturn:  # noqa: PLE0303
        cls._used()

    def __repr__(cls) -> str:
        return f"<{cls._path}, which backquant leaves out>"


def left_out(path: str, group: str) -> type:
    """What stands for the name ``path`` of PyTorch: importable; any use of it raises ``LeftOutError``.

    >>> from backquant.ao.quantization import quantize_jit
    >>> quantize_jit(1)
    Traceback (most recent call last):
        ...
    backquant.errors.LeftOutError: backquant has no quantize_jit: quantization of TorchScript modules ...
      where  torch.ao.quantization.quantize_jit
      fix    quantize the nn.Module that was scripted: prepared = backquant.prepare_fx(model, ...
    """
    name = path.rpartition(".")[2]
    return _LeftOut(name, (), {"_path": path, "_group": GROUPS[group], "__module__": __name__})
