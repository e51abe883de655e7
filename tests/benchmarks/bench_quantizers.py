"""Our encoders beside llama.cpp's ``ggml_quantize_chunk`` (no importance matrix): error first, then speed.

    python tests/benchmarks/bench_quantizers.py --ggml PATH/libggml-base.so [--gguf MODEL.gguf ...] [--threads 2]

Both get the same float32 tensors, interleaved A B A B; speed is in MB/s of BF16 source (2 bytes an element), the
median of the rounds. Tensors of a GGUF are taken dequantized, with a tenth of their spread as noise, so that the
lattice of the source format does not favour either side.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from tapeout.compiler.formats import FORMATS, Format

SOURCE = Path(__file__).parents[2] / "compiler" / "emit" / "quantize.c"
NAMES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
Array = npt.NDArray[np.float32]
Encoder = Callable[[Format, Array, npt.NDArray[np.uint8]], None]


def ours(folder: Path) -> Encoder:
    out = folder / "quantize.so"
    flags = ["-O3", "-ffp-contract=off", "-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v3", "-shared", "-fPIC"]
    subprocess.run([sys.executable, "-m", "ziglang", "cc", *flags, "-o", out, SOURCE], check=True)
    call = ctypes.CDLL(str(out)).tp_encode
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]

    def encode(form: Format, data: Array, result: npt.NDArray[np.uint8]) -> None:
        status = call(form.gguf_id, data.ctypes.data, result.ctypes.data, *data.shape)
        assert status == 0, status

    return encode


def theirs(path: Path) -> Encoder:
    call = ctypes.CDLL(str(path)).ggml_quantize_chunk
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    call.argtypes = [ctypes.c_int, pointer, pointer, whole, whole, whole, pointer]
    call.restype = ctypes.c_size_t

    def encode(form: Format, data: Array, result: npt.NDArray[np.uint8]) -> None:
        call(form.gguf_id, data.ctypes.data, result.ctypes.data, 0, *data.shape, None)

    return encode


def tensors(paths: list[Path]) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    data = {
        "gaussian": rng.normal(size=(512, 2048)) * 0.02,
        "student t4": rng.standard_t(4, size=(512, 2048)) * 0.02,
        "laplace": rng.laplace(size=(512, 2048)) * 0.02,
    }
    for path in paths:
        found = [t for t in gguf.GGUFReader(path).tensors if len(t.shape) == 2 and t.shape[0] >= 256]
        for tensor in found[:: max(1, len(found) // 5)][:6]:
            weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)[:1024]
            weight = weight[:, : weight.shape[1] // 256 * 256]
            data[f"{path.stem}:{tensor.name}"] = weight + rng.normal(size=weight.shape) * weight.std() * 0.1
    return {name: np.ascontiguousarray(value, np.float32) for name, value in data.items()}


def run(encode: Encoder, form: Format, data: Array, threads: int) -> tuple[npt.NDArray[np.uint8], float]:
    """The encoded rows and the seconds they took, rows split over ``threads``."""
    result = np.empty((data.shape[0], form.row_bytes(data.shape[1])), np.uint8)
    cuts = np.linspace(0, data.shape[0], threads + 1).astype(int)
    spans = [slice(int(a), int(b)) for a, b in itertools.pairwise(cuts)]
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(lambda rows: encode(form, data[rows], result[rows]), spans))
        return result, time.perf_counter() - start


def relative_rms(form: Format, encoded: npt.NDArray[np.uint8], data: Array) -> float:
    error = form.decode(encoded).astype(np.float64) - data
    return float(np.sqrt(np.mean(error**2) / np.mean(data.astype(np.float64) ** 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    data = tensors(arguments.gguf)
    with tempfile.TemporaryDirectory() as folder:
        sides = {"ours": ours(Path(folder)), "llama.cpp": theirs(arguments.ggml)}
        report(sides, data, arguments.threads, arguments.rounds)


def report(sides: dict[str, Encoder], data: dict[str, Array], threads: int, rounds: int) -> None:
    print(f"{'format':7}{'relative RMS: ours':>20}{'llama.cpp':>11}{'worst ratio':>13}", end="")
    print(f"{f'MB/s of BF16, {threads} thr: ours':>30}{'llama.cpp':>11}{'ratio':>8}")
    for name in NAMES:
        form = FORMATS[name]
        errors = {
            side: [relative_rms(form, run(encode, form, value, threads)[0], value) for value in data.values()]
            for side, encode in sides.items()
        }
        worst = max(a / b for a, b in zip(errors["ours"], errors["llama.cpp"], strict=True))
        speed: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, encode in sides.items():
                value = data["gaussian"]
                speed[side].append(2e-6 * value.size / run(encode, form, value, threads)[1])
        a, b = (statistics.median(speed[side]) for side in ("ours", "llama.cpp"))
        means = [statistics.mean(errors[side]) for side in ("ours", "llama.cpp")]
        print(f"{name:7}{means[0]:20.5f}{means[1]:11.5f}{worst:13.4f}{a:30.0f}{b:11.0f}{a / b:8.2f}")


if __name__ == "__main__":
    main()
