"""Device profiles: each is whole, and its figures agree with one another and with NVIDIA's published limits."""

from __future__ import annotations

import pytest

from tapeout.compiler.devices import CpuDevice, CudaDevice, known_devices, load_device
from tapeout.runtime.errors import TapeoutError

GPUS = ["a100", "b200", "h200", "rtx-4090", "rtx-5090", "rtx-pro-6000"]

# shared memory a multiprocessor, threads, blocks: NVIDIA CCCL, cuda/__device/arch_traits.h
LIMITS = {
    "sm_80": (164, 2048, 32),
    "sm_89": (100, 1536, 24),
    "sm_90": (228, 2048, 32),
    "sm_100": (228, 2048, 32),
    "sm_120": (100, 1536, 24),
}


def gpu(name: str) -> CudaDevice:
    device = load_device(name)
    assert isinstance(device, CudaDevice)
    return device


def test_all_profiles() -> None:
    assert known_devices() == sorted(["cpu", *GPUS])
    cpu = load_device("cpu")
    assert isinstance(cpu, CpuDevice)
    assert (cpu.memory, cpu.targets) == (16 << 30, ("x86_64_v3", "x86_64_v4"))


@pytest.mark.parametrize("name", GPUS)
def test_limits_are_those_of_the_architecture(name: str) -> None:
    device = gpu(name)
    shared, threads, blocks = LIMITS[device.arch]
    assert (device.shared_per_sm, device.threads_per_sm, device.blocks_per_sm) == (shared * 1024, threads, blocks)
    assert device.shared_per_block == device.shared_per_sm - 1024
    assert device.registers_per_sm == 65536


@pytest.mark.parametrize("name", GPUS)
def test_rates_agree(name: str) -> None:
    device = gpu(name)
    lanes = 64 if device.arch == "sm_80" else 128
    assert device.f32_tflops == pytest.approx(2e-6 * lanes * device.sm_count * device.clock_mhz, rel=0.01)
    rates = device.matrix_tflops
    assert (rates.fp8 is not None) == ("fp8" in device.features)
    assert (rates.fp4 is not None) == ("fp4" in device.features)
    assert rates.bf16 < (rates.fp8 or rates.int8 or 0) < (rates.fp4 or float("inf"))
    assert device.bandwidth_gb_s <= device.peak_bandwidth_gb_s
    assert (device.bandwidth_gb_s < device.peak_bandwidth_gb_s) == ("bandwidth_gb_s" in device.measured)
    assert ("pdl" in device.features) == (device.capability >= 90)


def test_a_shared_memory_limit_of_sm_120_is_the_usable_one() -> None:
    assert gpu("rtx-pro-6000").shared_per_block == gpu("rtx-5090").shared_per_block == 101_376


def test_unknown_device_names_a_close_one() -> None:
    with pytest.raises(TapeoutError, match=r"'h20'; did you mean h200\? known: a100, b200, cpu, h200, rtx-4090"):
        load_device("h20")
