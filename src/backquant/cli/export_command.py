"""The command ``export``: an artifact as a file of a deployment target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from backquant.cli.console import emit, guarded
from backquant.errors import UsageError

__all__ = [
    "beside",
    "checked_target",
    "export",
    "parse_dynamic",
    "parse_integer_io",
    "parse_options",
]


def export(
    artifact: Annotated[Path, typer.Argument(help="A file that quantize wrote.")],
    to: Annotated[
        str | None,
        typer.Option("--to", help="The target: onnx, openvino, …; default: by the file's suffix."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file; default: named like ARTIFACT."),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--inputs", help="Shape and dtype of an argument; default: those of calibration."
        ),
    ] = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            "--dynamic",
            help="An axis whose size may vary, e.g. x:0=batch or x:0=batch<=64; 0=batch of a single input.",
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            help="Least share of multiply-adds on integer kernels (0.9), or a module that must be.",
        ),
    ] = None,
    integer_io: Annotated[
        str | None,
        typer.Option(
            "--integer-io",
            help="Integers in place of floats: all, none, or inputs by name and outputs by place: x,0.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="Option of the target, e.g. opset=21."),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option("--accelerator", help="The chip to compile for, e.g. ethos-u55-128."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the file.")] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="Package that the artifact may refer to."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> None:
    """Write a quantized model for another runtime, and print which kernels it will run there."""
    import backquant
    from backquant.calibrate.feed import spinner
    from backquant.cli.models import parse_inputs, parse_requirement

    with guarded(as_json=as_json):
        path = output if output is not None else beside(artifact, to)
        checked_target(to, path, force)
        required = parse_requirement(require)
        chip = {} if accelerator is None else {"accelerator": accelerator}
        axes = parse_dynamic(dynamic or ())
        quantized = backquant.load(artifact, allow=tuple(allow or ()))
        shapes = _of_inputs(axes, quantized)
        options = {**parse_options(option or ()), **chip}
        with spinner(f"writing {path}"):
            exported = backquant.export(
                quantized,
                path,
                to=to,
                example_inputs=parse_inputs(inputs) if inputs else None,
                dynamic_shapes=shapes,
                require=required,
                integer_io=parse_integer_io(integer_io),
                overwrite=force,
                options=options,
            )
    emit(exported.render(), as_json=as_json, data=exported.to_dict())


def beside(artifact: Path, to: str | None) -> Path:
    """The file that an export of ``artifact`` gets where no name is given.

    >>> beside(Path("model.bq"), "openvino").name
    'model.xml'
    """
    if to is None:
        raise UsageError(
            "neither a target nor a file is named",
            where="export",
            fix="--to onnx, or -o model.onnx",
        )
    from backquant.deploy import usual_suffix

    return artifact.with_suffix(usual_suffix(to))


def checked_target(to: str | None, path: Path, force: bool) -> Path:
    """``path``, refused before minutes of work where the export would refuse it after them."""
    from backquant.deploy import check_installed, find_target
    from backquant.deploy.target import check_place

    check_installed(find_target(to, path))
    if path.is_file() and not force:
        raise UsageError(
            f"{path} exists",
            where="export",
            fix="--force   # replaces it",
        )
    check_place(path, overwrite=force)
    return path


def parse_integer_io(text: str | None) -> bool | dict[str | int, bool] | None:
    """What ``integer_io`` of ``backquant.export`` is told.

    >>> parse_integer_io("all"), parse_integer_io("none"), parse_integer_io("image,0")
    (True, False, {'image': True, 0: True})
    """
    if text is None or text in ("all", "none"):
        return None if text is None else text == "all"
    return {int(name) if name.isdecimal() else name: True for name in text.split(",")}


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` as the options of ``backquant.export``; values are read as YAML.

    Raises ``UsageError`` for text of another form.

    >>> parse_options(["opset=21", "translations=mypkg:TABLE", "inductor_configs={max_autotune: true}"])
    {'opset': 21, 'translations': 'mypkg:TABLE', 'inductor_configs': {'max_autotune': True}}
    """
    import yaml

    options = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise _no_option(text) from error
        if not name.isidentifier() or options[name] is None:
            raise _no_option(text)
    return options


def _no_option(text: str) -> UsageError:
    return UsageError(
        f"{text!r} sets no option", where="--option", fix="a name and a value: --option opset=21"
    )


def parse_dynamic(texts: Any) -> dict[str, dict[int, str]] | None:
    """``NAME:AXIS=LABEL`` as the dynamic shapes of ``backquant.export``; equal labels are equal sizes,
    and a label may have a bound: ``batch<=64``. Without ``NAME:`` it is of the model's only input, "".

    Raises ``UsageError`` for text of another form.

    >>> parse_dynamic(["x:0=batch", "mask:0=batch"])
    {'x': {0: 'batch'}, 'mask': {0: 'batch'}}
    """
    shapes: dict[str, dict[int, str]] = {}
    for text in texts:
        name, _, rest = text.rpartition(":")
        axis, _, label = rest.partition("=")
        known, _, bound = label.partition("<=")
        is_label = (known or "d").isidentifier() and (bound or "0").isdecimal()
        if not ((name or "only").isidentifier() and axis.isdecimal() and is_label):
            raise UsageError(
                f"{text!r} names no axis",
                where="--dynamic",
                fix="the argument's name, the axis and a label: --dynamic x:0=batch",
            )
        shapes.setdefault(name, {})[int(axis)] = label or f"{name}_{axis}"
    return shapes or None


def _of_inputs(shapes: dict[str, dict[int, str]] | None, quantized: Any) -> Any:
    """``shapes`` with the name of the model's only input in place of "". Raises ``UsageError``."""
    graph = getattr(quantized, "graph_module", None)
    if shapes is None or graph is None:
        return shapes
    names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
    if "" in shapes and len(names) == 1:
        shapes = {names[0] if name == "" else name: axes for name, axes in shapes.items()}
    for name, axes in shapes.items():
        if name not in names:
            axis, label = next(iter(axes.items()))
            raise UsageError(
                f"the model has no input {name!r}" if name else "the model has several inputs",
                where=f"--dynamic {name}:{axis}={label}" if name else f"--dynamic {axis}={label}",
                fix=" or ".join(f"--dynamic {known}:{axis}={label}" for known in names),
            )
    return shapes
