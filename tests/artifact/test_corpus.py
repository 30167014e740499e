"""Files of earlier versions load and compute what they did; ``tools/artifact_corpus.py`` wrote them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import backquant
from backquant.artifact import manifest
from backquant.artifact.file import FORMAT_VERSION

CORPUS = Path(__file__).with_name("corpus")
NAMES = sorted(path.name.removesuffix(".bq.gz") for path in CORPUS.glob("*.bq.gz"))


@pytest.mark.parametrize("name", NAMES)
def test_files_of_earlier_versions_load_and_compute_the_same(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.bq"
    path.write_bytes(gzip.decompress((CORPUS / f"{name}.bq.gz").read_bytes()))
    tensors = load_file(CORPUS / f"{name}.safetensors")
    wanted = tensors.pop("output")
    inputs = [tensors[key] for key in sorted(tensors)]
    for verify in (True, False):
        # float operators between the kernels differ in the last bits from CPU to CPU
        torch.testing.assert_close(
            backquant.load(path, verify=verify)(*inputs), wanted, rtol=1e-4, atol=1e-4
        )


def test_the_corpus_has_each_kind_of_model_in_the_present_format() -> None:
    present = [name for name in NAMES if name.startswith(f"v{FORMAT_VERSION}-")]
    assert len(present) >= 4
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 200_000
    assert Path(manifest.__file__).with_name(f"schema_v{FORMAT_VERSION}.json").exists()
