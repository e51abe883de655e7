"""The CUDA backend: the driver API alone, kernels and graphs from the artifact, no Python per launch in a replay."""

from __future__ import annotations

from tapeout.runtime.cuda.opening import open_cuda

__all__ = ["open_cuda"]
