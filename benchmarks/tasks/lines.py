"""A recogniser of text lines: PP-OCRv4's, with the weights that ``rapidocr-onnxruntime`` brings as ONNX.

The lines are rendered: words of PyTorch's documentation in fonts of matplotlib, turned, blurred, noisy.
"""

from __future__ import annotations

import random
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.packages import folder_of

BATCH, HEIGHT, WIDTH = 8, 48, 320


def recogniser() -> tuple[nn.Module, list[str]]:
    """The network in PyTorch's operators, and the character of each class; the first is the blank."""
    import onnx
    import onnxruntime
    from onnx2torch import convert

    import benchmarks.stock  # noqa: F401  the schemas of torchvision's operators

    file = (
        folder_of("rapidocr-onnxruntime", "rapidocr_onnxruntime")
        / "models"
        / "ch_PP-OCRv4_rec_infer.onnx"
    )
    model = onnx.load(str(file))
    sizes = model.graph.input[0].type.tensor_type.shape.dim
    for position, size in enumerate((BATCH, 3, HEIGHT, WIDTH)):
        sizes[position].dim_value = size
    characters = next(item.value for item in model.metadata_props if item.key == "character")
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # folds what depends on sizes alone
    options.graph_optimization_level = level
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "folded.onnx")
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        model = onnx.load(options.optimized_model_filepath)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = convert(model)
    return network.eval(), ["", *characters.splitlines(), " "]


def rendered(count: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Images of lines, ``count`` x 3 x 48 x 320 between -1 and 1, and what they say."""
    made = random.Random(seed)
    words = sorted(set(re.findall(r"[A-Za-z]{3,9}", torch.nn.functional.conv2d.__doc__ or "")))
    words += sorted(set(re.findall(r"[A-Za-z]{3,9}", nn.LSTM.__doc__ or "")))
    texts = []
    while len(texts) < count:
        text = " ".join(
            made.choice((made.choice(words), str(made.randrange(10, 9999)))) for _ in range(2)
        )
        texts.append(text)
    images = torch.stack([_line(text, made) for text in texts])
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    return images + 0.04 * noise, texts


def _line(text: str, made: random.Random) -> torch.Tensor:
    import numpy as np
    from PIL import Image, ImageDraw, ImageFilter, ImageFont

    font = ImageFont.truetype(str(made.choice(_fonts())), made.randrange(26, 34))
    left, top, right, bottom = font.getbbox(text)
    paper, ink = made.randrange(170, 256), made.randrange(0, 90)
    image = Image.new("L", (int(right - left) + 16, 48), paper)
    place = (8 - left, (48 - (bottom - top)) // 2 - top)
    ImageDraw.Draw(image).text(place, text, font=font, fill=ink)
    image = image.rotate(
        made.uniform(-1.5, 1.5), fillcolor=paper, resample=Image.Resampling.BILINEAR
    )
    image = image.filter(ImageFilter.GaussianBlur(made.uniform(0, 1.3)))
    width = min(WIDTH, image.width)
    image = image.resize((width, HEIGHT))
    result = torch.zeros(3, HEIGHT, WIDTH)
    result[:, :, :width] = torch.tensor(np.asarray(image).copy()).float() / 127.5 - 1
    return result


def _fonts() -> list[Path]:
    folder = folder_of("matplotlib", "matplotlib") / "mpl-data" / "fonts" / "ttf"
    return sorted(path for path in folder.glob("DejaVu*.ttf") if "Display" not in path.name)


def decoded(classes: torch.Tensor, characters: list[str]) -> list[str]:
    """What the most probable classes of each step say: repeated ones once, blanks not at all."""
    found = []
    for row in classes.argmax(-1).tolist():
        kept = [now for before, now in zip([0, *row], row, strict=False) if now not in (0, before)]
        found.append("".join(characters[now] for now in kept))
    return found


def share_right(found: Any, texts: list[str]) -> float:
    """The share of lines of which every character is right; spaces do not count."""
    pairs = zip(found, texts, strict=True)
    return sum(a.replace(" ", "") == b.replace(" ", "") for a, b in pairs) / len(texts)
