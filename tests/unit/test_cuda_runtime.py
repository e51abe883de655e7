"""The CUDA backend on a fake driver: what it allocates, copies, launches and gives back, and what it refuses."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_driver
import numpy as np
import pytest
import tiny_gpu
from fake_driver import FakeCuda, check_lifetimes
from tiny_gpu import CONTEXT, PAGE, VOCAB, continuation, fake_gpu

from tapeout.runtime import Model, TapeoutError, load
from tapeout.runtime.cuda import driver as driver_module
from tapeout.runtime.sequence import SamplingOptions

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gpu.write_artifact(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake driver in place of cuda.bindings.driver."""
    gpu = fake_gpu()
    monkeypatch.setattr(driver_module, "bindings", lambda: gpu)
    return gpu


@pytest.fixture
def model(artifact: Path, gpu: FakeCuda) -> Iterator[Model]:
    with load(artifact, threads=3) as model:
        yield model
    assert gpu.held() == []


def generated(model: Model, prompt: list[int], count: int, **options: Any) -> list[int]:
    return [step.token for step in model.generate(prompt, max_tokens=count, **options)]


# ---- tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False])
def test_generation_follows_the_model(artifact: Path, gpu: FakeCuda, graphs: bool) -> None:
    with load(artifact, graphs=graphs) as model:
        for length in (1, 4, 5, 8, 9, 17):
            prompt = (PROMPT * 2)[:length]
            expected = continuation(prompt, 12)
            cut = expected.index(tiny_gpu.EOS) + 1 if tiny_gpu.EOS in expected else 12
            assert generated(model, prompt, 12) == expected[:cut]
        assert (model.target, model.device) == ("sm_90", "Fake GPU")
    assert gpu.held() == []


def test_generation_ends_with_the_context(model: Model) -> None:
    model.eos_ids = frozenset()
    steps = list(model.generate(PROMPT, max_tokens=1000))
    assert [step.token for step in steps] == continuation(PROMPT, CONTEXT - len(PROMPT) + 1)
    assert steps[-1].finish_reason == "context"


def test_sampling_options_and_positions_reach_the_device(model: Model) -> None:
    model.eos_ids = frozenset()
    options = {"temperature": 0.7, "seed": 11}
    assert generated(model, PROMPT, 9, **options) == continuation(PROMPT, 9, 0.7, 11)
    assert generated(model, PROMPT, 9) == continuation(PROMPT, 9)


def test_sequences_of_one_batch_do_not_mix(model: Model) -> None:
    prompts = [PROMPT[:3], PROMPT[:7], PROMPT]
    sequences = [model.pool.open(SamplingOptions(0.5, seed=i) if i else SamplingOptions()) for i in range(3)]
    tokens = [[model.prefill(s, ids)] for s, ids in zip(sequences, prompts, strict=True)]
    for step in range(8):
        chosen = model.decode(sequences[: 3 - step // 4], [each[-1] for each in tokens[: 3 - step // 4]])
        for each, token in zip(tokens, chosen, strict=False):
            each.append(token)
    for index, (ids, each) in enumerate(zip(prompts, tokens, strict=True)):
        assert each == continuation(ids, len(each), 0.5 if index else 0.0, index)


def test_generations_in_turns_are_those_one_by_one(model: Model) -> None:
    model.eos_ids = frozenset()
    prompts = [PROMPT[:2], PROMPT[:5], PROMPT[3:]]
    running = [model.generate(prompt, max_tokens=10) for prompt in prompts]
    taken = [[next(each).token for each in running] for _ in range(10)]
    assert [list(tokens) for tokens in zip(*taken, strict=True)] == [continuation(prompt, 10) for prompt in prompts]


def test_generations_on_other_threads(model: Model) -> None:
    model.eos_ids = frozenset()
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(generated(model, PROMPT, 5)))
    thread.start()
    thread.join()
    assert found == [continuation(PROMPT, 5)] == [generated(model, PROMPT, 5)]


# ---- one step in flight ------------------------------------------------------------------------------------------


def test_one_step_runs_ahead_and_nothing_is_uploaded(model: Model, gpu: FakeCuda) -> None:
    sequence = model.pool.open()
    first = model.prefill(sequence, PROMPT)
    stream = model.stream([sequence], [first], 12)
    seen = [next(stream)[0], next(stream)[0]]
    for step in range(3, 12):
        gpu.copies.clear()
        launched = gpu.calls["cuGraphLaunch"]
        seen.append(next(stream)[0])
        assert gpu.calls["cuGraphLaunch"] == launched + 1
        uploads = [nbytes for kind, _, nbytes in gpu.copies if kind == "up"]
        grows = (len(PROMPT) + step) % PAGE == 0  # the step that was launched ahead needs a page
        assert uploads == ([4] if grows else [])
        assert sequence.length == len(PROMPT) + step + 1
    stream.close()
    assert sequence.length == len(PROMPT) + len(seen)
    assert [first, *seen] == continuation(PROMPT, 12)
    model.pool.close(sequence)


def test_a_stream_that_is_left_leaves_no_trace(model: Model) -> None:
    """The step ahead wrote a token that nobody took; what follows does not see it."""
    sequence = model.pool.open()
    stream = model.stream([sequence], [model.prefill(sequence, PROMPT)], 15)
    tokens = [next(stream)[0] for _ in range(3)]
    stream.close()
    history = [*PROMPT, *continuation(PROMPT, 1), *tokens]
    other = 7  # not the token that the model would have taken
    assert model.decode([sequence], [other]) == continuation([*history[:-1], other], 1)
    model.pool.close(sequence)


def test_the_last_steps_run_nothing_ahead(model: Model, gpu: FakeCuda) -> None:
    sequence = model.pool.open()
    token = model.prefill(sequence, PROMPT)
    launched = gpu.calls["cuGraphLaunch"]
    assert len(list(model.stream([sequence], [token], 5))) == 5
    assert gpu.calls["cuGraphLaunch"] == launched + 5
    model.pool.close(sequence)


def test_a_full_pool_is_an_error_of_the_step_that_needs_the_page(model: Model) -> None:
    hogs = [model.pool.open() for _ in range(3)]
    for hog, length in zip(hogs, (CONTEXT, CONTEXT, CONTEXT - 4 * PAGE), strict=True):
        model.pool.grow(hog, length)
    sequence = model.pool.open()
    token = model.prefill(sequence, PROMPT[:8])
    model.pool.grow(sequence, 4 * PAGE)
    stream = model.stream([sequence], [token], 20)
    assert [next(stream)[0] for _ in range(8)] == continuation(PROMPT[:8], 9)[1:]
    with pytest.raises(TapeoutError, match="the KV pool is full"):
        next(stream)
    assert sequence.length == 4 * PAGE


def test_numbers_that_broke_are_an_error(model: Model, gpu: FakeCuda) -> None:
    def broken(gpu: FakeCuda, args: Any) -> None:
        tiny_gpu.mix(gpu, args)
        if gpu.get("i", args["positions"]) >= 12:
            gpu.put("H", args["y"], 0, 0x7FC0)

    gpu.kernels["tp_mix"] = broken
    sequence = model.pool.open()
    stream = model.stream([sequence], [model.prefill(sequence, PROMPT)], 8)
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(TapeoutError, match="the step failed: the logits hold NaN or infinite values"):
        next(stream)
    model.pool.close(sequence)
    gpu.kernels["tp_mix"] = tiny_gpu.mix
    assert generated(model, PROMPT, 3) == continuation(PROMPT, 3)


# ---- logits and traces -------------------------------------------------------------------------------------------


def test_logits_of_every_position(model: Model) -> None:
    ids = PROMPT * 2
    logits = model.logits(ids)
    assert logits.shape == (len(ids), VOCAB)
    assert logits.argmax(1).tolist() == [continuation(ids[: i + 1], 1)[0] for i in range(len(ids))]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_traced_launches_show_what_was_written(model: Model, phase: str) -> None:
    made: dict[str, list[np.ndarray]] = {}
    for traced in model.trace(PROMPT, phase):
        assert traced.graph.startswith((phase, "head"))
        made.setdefault(traced.produces[0][0], []).append(traced.values)
    values = {op: np.concatenate(parts) for op, parts in made.items()}
    assert values["embed"][:, 0].tolist() == PROMPT
    assert values["lm_head"].argmax(1).tolist() == [tiny_gpu.next_token(PROMPT[: i + 1]) for i in range(len(PROMPT))]
    sums = [sum((p + 1) * (t + 1) for p, t in enumerate(PROMPT[: i + 1])) % VOCAB for i in range(len(PROMPT))]
    assert values["mix"][:, 0].tolist() == sums
    assert phase == "decode" or values["gather"][:, 0].tolist() == sums
    assert generated(model, PROMPT, 4) == continuation(PROMPT, 4)


def test_a_kernel_that_writes_nothing_shows(model: Model, gpu: FakeCuda) -> None:
    model.logits(PROMPT)
    gpu.kernels["tp_gather"] = lambda gpu, args: None
    values = [traced.values for traced in model.trace(PROMPT) if traced.op == "gather"]
    assert all(np.isnan(each).all() for each in values)


def test_replay_equals_eager_over_poisoned_outputs(artifact: Path, gpu: FakeCuda) -> None:
    found: list[list[int]] = []
    for graphs in (True, False):
        with load(artifact, graphs=graphs) as model:
            sequence = model.pool.open()
            tokens = [model.prefill(sequence, PROMPT)]
            for _ in range(15):
                model.backend.poison_outputs()
                tokens += model.decode([sequence], [tokens[-1]])
            found.append(tokens)
    assert found[0] == found[1] == continuation(PROMPT, 16)


# ---- memory and graphs -------------------------------------------------------------------------------------------


def test_three_allocations_hold_everything(model: Model, gpu: FakeCuda) -> None:
    memory = model.plan["memory"]
    generated(model, PROMPT, 9)
    model.logits(PROMPT)
    assert gpu.calls["cuMemAlloc"] == 3
    held = model.device_memory()
    assert held is not None
    assert held.planned == held.used == sum(memory[name] for name in ("weights", "kv_pool", "arena"))
    assert (held.context, held.total) == (gpu.context_bytes, gpu.memory)
    weights = model.backend._addresses(["weight", "permutation"])
    assert gpu.read(weights, memory["weights"]) == tiny_gpu.PERMUTATION.tobytes() + tiny_gpu.TAIL


def test_the_context_of_the_caller_comes_back(artifact: Path, gpu: FakeCuda) -> None:
    mine = fake_driver.Handle(77)
    gpu.cuCtxSetCurrent(mine)
    with load(artifact) as model:
        next(model.generate(PROMPT))
        assert gpu.cuCtxGetCurrent()[1] is not mine
    assert gpu.cuCtxGetCurrent()[1] is mine


def test_lists_are_captured_once_and_only_if_used(model: Model, gpu: FakeCuda) -> None:
    def captured() -> list[str]:
        return [entry.name for entry in model.backend.lists if entry.graph is not None]

    assert captured() == ["prefill.4", "decode.1", "head.1", "sample.1"]
    generated(model, PROMPT, 4)
    assert captured() == ["prefill.4", "prefill.8", "decode.1", "head.1", "sample.1"]
    assert all(entry.capture_s > 0 for entry in model.backend.lists if entry.graph)
    assert gpu.calls["cuGraphInstantiate"] == 5
    generated(model, PROMPT, 4)
    assert gpu.calls["cuGraphInstantiate"] == 5


def test_launches_stay_within_live_buffers(model: Model, gpu: FakeCuda) -> None:
    for entry in model.backend.lists:
        before = len(gpu.graphs)
        model.backend._launcher.prepare(entry)
        launches = gpu.graphs[before] if len(gpu.graphs) > before else None
        planned = next(graph for graph in model.plan["graphs"] if graph["name"] == entry.name)
        names = [launch["kernel"] for launch in planned["launches"]]
        launches = launches or next(g for g in gpu.graphs if [e.symbol for e in g] == [f"tp_{n}" for n in names])
        check_lifetimes(launches, planned, model.plan["memory"], model.backend.arena.address)
        assert all(launch.pdl for launch in launches)
    planned["launches"][0]["args"]["logits"] = ["arena", 0]
    model.plan["memory"]["buffers"].clear()
    with pytest.raises(AssertionError, match=r"launch 0 of sample.1: logits is in no buffer"):
        check_lifetimes(launches, planned, model.plan["memory"], model.backend.arena.address)


def test_the_fake_refuses_what_a_capture_forbids(gpu: FakeCuda) -> None:
    driver = driver_module.Driver(0)
    driver.open()
    stream = driver.stream()
    gpu.cuStreamBeginCapture(stream, 1)
    for call in (
        lambda: driver.alloc(256, "x"),
        lambda: driver.synchronize(stream),
        lambda: driver.fill(0, 0, 0, stream),
    ):
        with pytest.raises((TapeoutError, AssertionError), match=r"CAPTURE|no live allocation"):
            call()
    driver.close()


def test_older_gpus_run_without_dependent_launch(tmp_path: Path, gpu: FakeCuda) -> None:
    gpu.capability = (8, 9)
    with load(tiny_gpu.write_artifact(tmp_path / "a", ("sm_80", "sm_90"))) as model:
        assert model.target == "sm_80"
        assert generated(model, PROMPT, 5) == continuation(PROMPT, 5)
        assert not any(launch.pdl for graph in gpu.graphs for launch in graph)


# ---- refusals ----------------------------------------------------------------------------------------------------


def refused(artifact: Path, gpu: FakeCuda | None = None, **options: Any) -> str:
    """The one sentence with which loading ends, and nothing is left."""
    with pytest.raises(TapeoutError) as caught:
        load(artifact, **options)
    assert "\n" not in str(caught.value)
    assert gpu is None or gpu.held() == []
    return str(caught.value)


def test_no_bindings(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert refused(artifact) == (
        "this artifact runs on an NVIDIA GPU, which needs the package cuda-bindings; "
        "install it with `pip install 'tapeout[cuda]'`"
    )


def test_no_driver(artifact: Path, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(gpu, "cuInit", missing)
    assert refused(artifact, gpu) == (
        "this artifact runs on an NVIDIA GPU, but no driver was found (Failed to dlopen libcuda.so.1); "
        "install the NVIDIA driver, or compile for a device of this machine"
    )


def test_no_gpu_or_another_number(artifact: Path, gpu: FakeCuda) -> None:
    assert refused(artifact, gpu, device=1) == (
        "there is no GPU 1: the process sees 1, numbered from 0; CUDA_VISIBLE_DEVICES decides which are seen"
    )
    gpu.devices = 0
    assert refused(artifact, gpu).startswith("there is no GPU 0: the driver sees none;")


def test_another_architecture(artifact: Path, gpu: FakeCuda) -> None:
    gpu.capability = (12, 0)
    assert refused(artifact, gpu) == (
        f"{artifact}: the artifact holds code for sm_90, but GPU 0 (Fake GPU) runs sm_120; "
        "compile it for this GPU, or choose another with device"
    )
    assert refused(artifact, gpu, target="sm_90") == ("GPU 0 (Fake GPU) does not run target sm_90; it runs sm_120")
    assert gpu.calls["cuMemAlloc"] == 0


def test_too_little_memory(artifact: Path, gpu: FakeCuda) -> None:
    gpu.memory = gpu.context_bytes + (69 << 20)
    assert refused(artifact, gpu) == (
        "the artifact needs 0.07 GiB of GPU memory (weights 0.00, KV pool 0.00, arena 0.00), but GPU 0 (Fake GPU) has "
        "0.07 GiB free of 0.36; free some, or compile with a smaller serving.max_context or serving.max_sequences"
    )
    assert gpu.calls["cuMemAlloc"] == gpu.calls["cuMemcpyHtoDAsync"] == 0


def test_too_few_multiprocessors(tmp_path: Path, gpu: FakeCuda) -> None:
    """As on a MIG slice of a GPU of the right architecture."""
    artifact = tiny_gpu.write_artifact(tmp_path, change=lambda plan: plan["kernels"].update(multiprocessors=132))
    gpu.multiprocessors = 60
    assert refused(artifact, gpu) == (
        "the artifact was planned for a GPU of 132 multiprocessors, but GPU 0 (Fake GPU) has 60; "
        "compile it for this GPU, or choose another with device"
    )
    assert gpu.calls["cuMemAlloc"] == gpu.calls["cuMemcpyHtoDAsync"] == 0
    gpu.multiprocessors = 132
    with load(artifact) as model:
        assert generated(model, PROMPT, 3) == continuation(PROMPT, 3)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["kernels/sm_90/mix.cubin", "weights/rank0.safetensors"])
def test_a_flipped_bit(tmp_path: Path, gpu: FakeCuda, file: str) -> None:
    artifact = tiny_gpu.write_artifact(tmp_path)
    flip(artifact / file, -1)
    size = (artifact / file).stat().st_size
    start = size // tiny_gpu.CHUNK * tiny_gpu.CHUNK
    assert refused(artifact, gpu) == (
        f"{artifact / file}: bytes {start} to {size} differ from what was compiled (digest mismatch); "
        "the file is damaged, copy the artifact again or compile it again"
    )
    assert gpu.calls["cuModuleLoadData"] == 0 or file.startswith("weights")


def test_a_cubin_that_is_missing(tmp_path: Path, gpu: FakeCuda) -> None:
    artifact = tiny_gpu.write_artifact(tmp_path)
    (artifact / "kernels/sm_90/mix.cubin").unlink()
    assert "the file kernels/sm_90/mix.cubin is missing" in refused(artifact, gpu)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an unlisted cubin": (
        lambda plan: plan["kernels"]["table"][0].update(name="other"),
        "the artifact's manifest lists no kernels/sm_90/other.cubin; compile it again",
    ),
    "another architecture": (
        lambda plan: plan["kernels"]["table"][0]["resources"].clear(),
        "plan.json holds no kernel embed for sm_90; compile the artifact again",
    ),
    "another symbol": (
        lambda plan: plan["kernels"]["table"][0]["resources"]["sm_90"].update(symbol="nothing"),
        "cuModuleGetFunction failed for kernel embed on GPU 0 (Fake GPU): CUDA_ERROR_NOT_FOUND (named symbol",
    ),
    "an argument outside": (
        lambda plan: plan["graphs"][0]["launches"][0]["args"].update(y=["arena", 1 << 30]),
        "plan.json places an argument at byte 1073741824 of the arena, which has",
    ),
    "an unknown weight": (
        lambda plan: plan["graphs"][0]["launches"][0]["args"].update(y=["weight", "missing"]),
        "plan.json points at weight missing, but holds no such place",
    ),
    "a missing argument": (
        lambda plan: plan["graphs"][0]["launches"][1]["args"].pop("kv"),
        "plan.json gives launch 1 of prefill.4 (op mix, kernel mix) no kv; compile the artifact again",
    ),
    "weights of another size": (
        lambda plan: plan["memory"].update(weights=512),
        "rank0.safetensors: holds 5243136 bytes of weights, and plan.json has 512;",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_plan_that_does_not_fit(tmp_path: Path, gpu: FakeCuda, what: str) -> None:
    change, sentence = CHANGES[what]
    assert sentence in refused(tiny_gpu.write_artifact(tmp_path, change=change), gpu)


CALLS = ["cuDevicePrimaryCtxRetain", "cuMemGetInfo", "cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate", "cuEventCreate"]
CALLS += ["cuMemcpyHtoDAsync", "cuMemsetD8Async", "cuModuleLoadData", "cuFuncSetAttribute", "cuLaunchKernelEx"]
CALLS += ["cuStreamBeginCapture", "cuGraphInstantiate", "cuGraphUpload", "cuStreamSynchronize", "cuEventRecord"]


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_failing_call_is_named_and_leaves_nothing(artifact: Path, gpu: FakeCuda, call: str, after: int) -> None:
    if after and call in ("cuDevicePrimaryCtxRetain", "cuMemGetInfo", "cuMemsetD8Async"):
        pytest.skip("called once")
    gpu.fail[call] = (after, fake_driver.OUT_OF_MEMORY)
    text = refused(artifact, gpu, threads=2)
    assert text.startswith(f"{call} failed") and text.endswith("CUDA_ERROR_OUT_OF_MEMORY (out of memory)")
    if call == "cuLaunchKernelEx":
        kernel = ("embed", "mix")[after]
        assert f"for launch {after} of prefill.4 (op {kernel}, kernel {kernel}) on GPU 0 (Fake GPU)" in text


@pytest.mark.parametrize("graphs", [True, False])
def test_a_fault_on_the_device_is_named(artifact: Path, gpu: FakeCuda, graphs: bool) -> None:
    with load(artifact, graphs=graphs) as model:
        call = "cuEventSynchronize" if graphs else "cuStreamSynchronize"
        gpu.fail[call] = (gpu.calls[call] + (4 if graphs else 7), fake_driver.ILLEGAL_ADDRESS)
        with pytest.raises(TapeoutError) as caught:
            generated(model, PROMPT[:3], 5)
        where = "a step of decode.1" if graphs else "launch 2 of decode.1 (op lm_head, kernel head_body)"
        assert str(caught.value) == (
            f"{call} failed for {where} on GPU 0 (Fake GPU): "
            "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)"
        )
    assert gpu.held() == []


def test_the_wrapper_asks_for_calls_that_the_bindings_have() -> None:
    """The fake cannot tell: every name that it serves exists in cuda.bindings.driver too."""
    real = pytest.importorskip("cuda.bindings.driver")
    names = [name for name in dir(FakeCuda) if name.startswith("cu")]
    assert len(names) > 30 and not [name for name in names if not hasattr(real, name)]
    assert importlib.import_module("cuda.bindings.driver") is driver_module.bindings()
