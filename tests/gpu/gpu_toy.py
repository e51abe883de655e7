"""The toy model of tests/unit/tiny_gpu.py with real kernels: compiled by nvcc, or found in build/gpu/runtime."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("toy.cu")
CONTEXT = 512


def toy_cubin(architecture: str) -> bytes:
    """All of the toy's kernels for one architecture."""
    found = ROOT / "build" / "gpu" / "runtime" / f"toy_{architecture}.cubin"
    if found.is_file() and found.stat().st_mtime >= SOURCE.stat().st_mtime:
        return found.read_bytes()
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip(f"needs nvcc, or {found}")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "toy.cubin"
        command = [
            nvcc,
            "-cubin",
            f"-arch={architecture}",
            f"-DMAX_PAGES={CONTEXT // 4}",
            str(SOURCE),
            "-o",
            str(output),
        ]
        subprocess.run(command, check=True)
        return output.read_bytes()
