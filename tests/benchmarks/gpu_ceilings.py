"""The two ceilings of the card, measured in the same run as what is compared with them. Needs torch and triton."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _read(x, y, BLOCK: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * BLOCK
    values = tl.load(x + base + tl.arange(0, BLOCK))
    total = tl.sum(values)
    tl.store(y, total, mask=total == 0x12345678)


def milliseconds(run: Callable[[], Any], repeats: int = 9) -> float:
    """Median device time of one call, by events."""
    for _ in range(2):
        run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes a second of plain 16-byte reads over 4 GiB."""
    x = torch.randint(0, 2**31 - 1, (1 << 30,), dtype=torch.int32, device="cuda")
    y = torch.zeros(1, dtype=torch.int32, device="cuda")
    best = min(
        milliseconds(lambda block=block, warps=warps: _read[(x.numel() // block,)](x, y, BLOCK=block, num_warps=warps))
        for block in (4096, 8192, 16384)
        for warps in (4, 8)
    )
    return 4 * x.numel() / best * 1e3


def matrix_rate(size: int = 8192) -> float:
    """Operations a second of a bf16 product of two random square matrices."""
    a, b = (torch.randn((size, size), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: a @ b) * 1e3


def main() -> None:
    print(f"{torch.cuda.get_device_name()}: reads {read_bandwidth() / 1e12:.2f} TB/s, "
          f"bf16 products of 8192 {matrix_rate() / 1e12:.0f} TFLOP/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
