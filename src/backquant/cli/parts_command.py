"""The command ``quantize-parts``: models whose own ``forward`` no capture takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from backquant.cli.console import emit, guarded
from backquant.cli.model_commands import Allow, BatchSize, Json, Model, Recipe, Slower
from backquant.errors import UsageError
from backquant.files import is_folder


def quantize_parts(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write; it must not be there yet.")
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data", "-d", help=".npz, .safetensors, folder of .npy files, or module:iterable."
        ),
    ],
    backend: Annotated[str, typer.Option("--backend", "-b", help="Name or file.")] = "x86",
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help="Path of a submodule; once for each. Default: they are found."),
    ] = None,
    batch_size: BatchSize = 32,
    require: Annotated[
        float | None, typer.Option("--require", help="Least share of multiply-adds on integers.")
    ] = None,
    slower: Slower = None,
    recipe: Recipe = "default",
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Quantize the parts of a model whose forward cannot be captured (detectors). Writes a folder."""
    import backquant
    from backquant.cli.backends import sound_backend
    from backquant.cli.data import load_data
    from backquant.cli.models import load_model

    with guarded(as_json=as_json):
        if os.path.lexists(output) or not is_folder(output.parent):
            raise UsageError(
                f"{output} exists"
                if os.path.lexists(output)
                else f"there is no folder {output.parent}",
                where="--output",
                fix=f"--output {output.name}-2   # a folder that is not there yet, in one that is",
            )
        config = sound_backend(backend, allow)
        module, example = load_model(model)
        made = backquant.quantize_parts(
            module,
            example,
            parts=part,
            backend=config,
            calibration=load_data(data, module, batch_size),
            require=require,
            slower=slower,
            recipe=recipe,
            progress=not as_json,
        )
        backquant.save_parts(made, output, allow=tuple(allow or ()))
    emit(
        f"wrote {output}\n\n{made}",
        as_json=as_json,
        data={"folder": str(output), **made.to_dict()},
    )
