"""Plans from a config alone: formats by model.stored, what is refused, and what the commands do with such a plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import small_model

from tapeout.compiler.cli import main
from tapeout.compiler.driver import compile_spec
from tapeout.compiler.pipeline import Memo
from tapeout.compiler.spec import Model, Spec

CONFIG = {**small_model.CONFIG, "vocab_size": 128, "max_position_embeddings": 256}
LAYERS, HIDDEN, FFN, VOCAB, KV = 2, 64, 96, 128, 32
MATRICES = ("model.embed_tokens", "model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.k_proj",
            "model.layers.*.self_attn.v_proj", "model.layers.*.self_attn.o_proj", "model.layers.*.mlp.gate_proj",
            "model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj")  # fmt: skip
FORMATS = ("f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, int4_g32, "
           "int4_g64, int4_g128, int4_g32_zp, int4_g64_zp, int4_g128_zp, int4_g32_zp_f16, int4_g128_zp_f16, int8_g32, "
           "int8_g128, fp8, fp8_block128, fp8_row, mxfp4, nvfp4")  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

Compile = Callable[..., Any]


@pytest.fixture
def compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compile:
    """Compiles a spec through the command line: its plan, or the sentence that it ends in."""

    def run(model: Any, *options: str, plan_only: bool = True, to: str = "plan.json", **sections: Any) -> Any:
        file = tmp_path / "spec.yaml"
        file.write_text(json.dumps({"model": model, **sections}))
        only = ["--plan-only"] if plan_only else []
        code = main(["compile", str(file), "-o", str(tmp_path / to), *only, *options])
        said = capsys.readouterr().err
        if code == 0:
            return json.loads((tmp_path / to).read_bytes())
        assert code == 2 and said.startswith("error: ") and said.count("\n") == 1
        return said.removeprefix("error: ").rstrip("\n").replace(str(tmp_path), "DIR")

    return run


def config(**changes: Any) -> dict[str, Any]:
    """A model section of the tiny config; a change to None leaves the key out."""
    return {"config": {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}}


def planned(plan: Mapping[str, Any]) -> dict[str, str]:
    """The format that each slot is said to have, by its name."""
    return {node["slot"]: node["format"] for node in plan["recipes"] if node["op"] == "planned"}


def formats_by_kind(plan: Mapping[str, Any]) -> dict[str, set[str]]:
    kinds: dict[str, set[str]] = {}
    for name, format in planned(plan).items():
        kinds.setdefault(name.rpartition(".")[2], set()).add(format)
    return kinds


# -- model.stored


def test_without_stored_matrices_are_bf16_and_vectors_float32(compiled: Compile) -> None:
    plan = compiled(config())
    attention, mlp = (2 * HIDDEN + 2 * KV) * HIDDEN, 3 * FFN * HIDDEN
    matrices, norms = VOCAB * HIDDEN + LAYERS * (attention + mlp), (2 * LAYERS + 1) * HIDDEN
    assert plan["model"]["parameters"] == matrices + norms
    # every size is a whole number of tiles of 16 rows and of lines of 64 bytes, so nothing is padded but to pages
    exact = 2 * matrices + 4 * norms + 4 * (16 // 2)
    assert exact <= plan["memory"]["weights"] < exact + 4096 * len(plan["weights"])
    kinds = formats_by_kind(plan)
    norm = {"input_layernorm", "post_attention_layernorm", "norm"}
    assert {kind for kind, formats in kinds.items() if formats == {"f32"}} == norm
    assert {kind for kind, formats in kinds.items() if formats == {"bf16"}} == set(kinds) - norm
    assert plan["checkpoint"] == {"container": "config", "tensors": 0, "consumed": 0, "ignored": []}


def test_the_first_rule_that_matches_wins_over_later_ones_and_the_default(compiled: Compile) -> None:
    rules = [{"match": "*.1.mlp.down_proj", "format": "q4_0"}, {"match": "*.mlp.*", "format": "q8_0"}]
    found = planned(compiled({**config(), "stored": {"default": "f16", "rules": rules}}))
    assert found["model.layers.1.mlp.down_proj"] == "q4_0"
    assert found["model.layers.0.mlp.down_proj"] == found["model.layers.1.mlp.up_proj"] == "q8_0"
    assert found["model.layers.1.self_attn.o_proj"] == found["model.embed_tokens"] == "f16"


def test_a_conversion_starts_from_what_is_stored(compiled: Compile) -> None:
    plan = compiled({**config(), "stored": {"default": "q8_0"}}, quantization={"default": "q4_0"})
    down = next(entry for entry in plan["quantization"] if entry["weight"] == "model.layers.0.mlp.down_proj")
    assert (down["from"], down["to"]) == ("q8_0", "q4_0")


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (
            {"rules": [{"match": "*.up_proj", "format": "q8_0"}, {"match": "*.upp_proj", "format": "q8_0"}]},
            f"model.stored.rules[1] *.upp_proj matches no weight; weights are {', '.join(MATRICES)}",
        ),
        (
            {"rules": [{"match": "*norm*", "format": "q8_0"}]},
            f"model.stored.rules[0] *norm* matches no weight; weights are {', '.join(MATRICES)}",
        ),
        ({"default": "q9"}, f"DIR/spec.yaml:1: model.stored.default: 'q9' is no number format; use one of: {FORMATS}"),
        (
            {"rules": [{"match": "*", "format": "keep"}]},
            f"DIR/spec.yaml:1: model.stored.rules[0].format: 'keep' is no number format; use one of: {FORMATS}",
        ),
        (
            {"default": "q4_k"},
            "model.stored: model.embed_tokens has rows of 64, which are not whole blocks of q4_k (256 each); a rule "
            "can give it another format",
        ),
        (
            {"rules": [{"match": "*.down_proj", "format": "int4_g64"}]},
            "model.stored: model.layers.0.mlp.down_proj has rows of 96, which are not whole blocks of int4_g64 (64 "
            "each); a rule can give it another format",
        ),
        ("q8_0", 'DIR/spec.yaml:1: model.stored: needs a section (keys with values), got "q8_0" (text)'),
        ({"deflt": "q8_0"}, "DIR/spec.yaml:1: model.stored.deflt: unknown key; did you mean default? keys here: "
                            "default, rules"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused(compiled: Compile, stored: Any, message: str) -> None:
    assert compiled({**config(), "stored": stored}) == message


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_a_config_that_says_quantized_needs_stored(compiled: Compile, where: str) -> None:
    """Its matrices are not bfloat16, and which of them are what stands in the files that are not there."""
    if where == "top":
        model = config(quantization_config=FP8)
    else:
        shape = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 1,
                 "num_attention_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
                 "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 128}  # fmt: skip
        text = {**shape, "quantization_config": FP8}
        model = {"config": {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}}
    assert compiled(model) == (
        "model.config: quantization_config says that weights are quantized, and a config alone does not say which; "
        "model.stored lists their formats"
    )
    found = planned(compiled({**model, "stored": {"default": "fp8_block128"}}))
    assert found["model.layers.0.mlp.down_proj"] == "fp8_block128"


# -- what a config must be


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "x"}, "DIR/spec.yaml:1: model: needs source, or config for a plan without weights"),
        ({"config": ["a"]}, 'DIR/spec.yaml:1: model.config: needs a section (keys with values), got ["a"] (a list)'),
        (config(hidden_size=None), "model.config: config.json: hidden_size is missing; it must be a positive integer"),
        (config(vocab_size="many"), "model.config: config.json: vocab_size is 'many'; it must be a positive integer"),
        (
            config(num_hidden_layers=1025),
            "model.config: the config says 1025 layers; without a checkpoint that bears it out, at most 1024 are "
            "believed",
        ),
        (
            config(num_hidden_layers=10**15),
            "model.config: the config says 1000000000000000 layers; without a checkpoint that bears it out, at most "
            "1024 are believed",
        ),
        (
            {"config": {"architectures": ["KimiK25ForConditionalGeneration"],
                        "text_config": {"num_hidden_layers": 10**12}}},  # the family makes a list of as many
            "model.config: the config says 1000000000000 layers; without a checkpoint that bears it out, at most 1024 "
            "are believed",
        ),
        (
            config(head_dim=1 << 40),
            "model.config: the config says 1099511627776 channels a head; without a checkpoint that bears it out, at "
            "most 65536 are believed",
        ),
        (config(architectures="LlamaForCausalLM"), "model.config: config.json: architectures is 'LlamaForCausalLM'; it "
                                                   "must be a list of names"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_meant_is_refused(compiled: Compile, model: Any, message: str) -> None:
    assert compiled(model) == message


@pytest.mark.parametrize(("named", "said"), [(["FooForCausalLM"], "FooForCausalLM"), (None, "missing")])
def test_an_unknown_architecture_lists_the_known(compiled: Compile, named: Any, said: str) -> None:
    message = compiled(config(architectures=named))
    assert message.startswith(f"model.config: architecture {said} is unknown; known are LlamaForCausalLM, llama, ")
    assert message.endswith("DeepseekV4ForCausalLM")


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
def test_numbers_that_json_lacks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"model:\n  config: {{architectures: [LlamaForCausalLM], x: {{y: {number}}}}}\n")
    assert main(["compile", str(file), "-o", str(tmp_path / "out"), "--plan-only"]) == 2
    assert capsys.readouterr().err == (
        f"error: {file}:2: model.config: holds a number that is not finite, which no config.json does\n"
    )


def test_a_width_beyond_all_memory_is_one_sentence(compiled: Compile) -> None:
    width = 10**12
    message = compiled(config(hidden_size=width, tie_word_embeddings=True))
    attention = (2 * 64 + 2 * KV) * width
    matrices = VOCAB * width + LAYERS * (attention + 3 * FFN * width)
    assert message.startswith("the model does not fit in memory at any context: weights ")
    # the rotary frequencies take one line of 64 bytes, and the weights end on a page
    weights = int(message.split("weights ")[1].split(" ")[0].replace(",", ""))
    exact = 2 * matrices + 4 * 5 * width + 64
    assert exact <= weights < exact + 4096
    assert message.endswith("are there after serving.headroom; raise topology.memory or use smaller formats")


# -- without weights there is no artifact


def test_an_artifact_needs_weights(compiled: Compile, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rest = "is a config alone, which has no weights; name a checkpoint in model.source, or pass --plan-only to plan "
    for model, what in ((config(), "model.config"), ({"source": "config.json"}, "DIR/config.json")):
        assert compiled(model, plan_only=False, to="artifact") == f"{what} {rest}without one"
        gpus = {"device": "h200", "count": 2}  # weights are missing first of all
        assert compiled(model, plan_only=False, to="artifact", topology=gpus) == f"{what} {rest}without one"
    assert not (tmp_path / "artifact").exists()


def test_an_export_needs_weights(compiled: Compile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(config())
    assert main(["export-onnx", str(tmp_path / "spec.yaml"), "-o", str(tmp_path / "onnx")]) == 2
    assert capsys.readouterr().err.startswith("error: model.config is a config alone, which has no weights; ")


# -- a config.json, and a source beside a config


def test_a_config_file_plans_what_the_written_keys_plan(compiled: Compile, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    stored = {"default": "q8_0"}
    file = compiled({"source": "config.json", "name": "x", "stored": stored}, to="file.json")
    written = compiled({**config(), "name": "x", "stored": stored}, to="written.json")
    assert file["spec"]["model"]["source"] == "config.json" and written["spec"]["model"]["source"] is None
    assert {**file, "spec": 0} == {**written, "spec": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{broken", "DIR/config.json: not valid JSON (Expecting property name enclosed in double quotes: line 1 column "
                    "2 (char 1)); the file is damaged"),
        ('{"architectures": []}', "DIR/config.json: architecture missing is unknown; known are "),
        ("[]", "DIR/config.json: is neither GGUF nor safetensors nor ONNX (it begins with b'[]'); accepted are "),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config(compiled: Compile, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert compiled({"source": "config.json"}).startswith(message)


def test_a_source_wins_over_a_config_and_the_plan_says_what_differs(compiled: Compile, tmp_path: Path) -> None:
    small_model.write_folder(tmp_path / "model")
    changed = {**small_model.CONFIG, "num_hidden_layers": 4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    both = {"source": "model", "config": changed, "stored": {"default": "q4_0"}}
    plan = compiled(both, to="both.json")
    alone = compiled({"source": "model"}, to="alone.json")
    assert plan["weights"] == alone["weights"] and plan["model"] == alone["model"]
    assert [decision for decision in plan["decisions"] if decision["pass"] == "ingest"] == [
        {
            "pass": "ingest",
            "subject": "model",
            "choice": "model.source",
            "reason": "a spec that names both takes the source",
            "alternatives": [
                {
                    "choice": "model.config",
                    "why": "stands for a checkpoint that is not there; what it has says otherwise of "
                    "num_hidden_layers, rope_scaling",
                },
                {
                    "choice": "model.stored",
                    "why": "stands for a checkpoint that is not there; tensors say their formats themselves",
                },
            ],
            "evidence": {},
        }
    ]
    assert not [decision for decision in alone["decisions"] if decision["pass"] == "ingest"]


def test_a_source_that_agrees_or_has_no_such_keys_wins_too(compiled: Compile, tmp_path: Path) -> None:
    small_model.write_folder(tmp_path / "model")
    small_model.write_gguf(tmp_path / "model.gguf")
    for source, written in (("model", dict(small_model.CONFIG)), ("model.gguf", {"hidden_size": 1})):
        plan = compiled({"source": source, "config": written}, "--force")
        (decision,) = (each for each in plan["decisions"] if each["pass"] == "ingest")
        assert decision["alternatives"] == [
            {"choice": "model.config", "why": "stands for a checkpoint that is not there"}
        ]


def test_a_section_inside_the_config_is_compared_key_by_key(compiled: Compile, tmp_path: Path) -> None:
    inside = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 512}  # fmt: skip
    small_model.write_folder(tmp_path / "model", config={**small_model.CONFIG, "rope_scaling": inside})
    written = {**small_model.CONFIG, "rope_scaling": {**inside, "factor": 4.0, "extra": 1}}
    plan = compiled({"source": "model", "config": written})
    (decision,) = (each for each in plan["decisions"] if each["pass"] == "ingest")
    assert decision["alternatives"][0]["why"].endswith("otherwise of rope_scaling.factor, rope_scaling.extra")


def test_one_process_keeps_configs_apart(tmp_path: Path) -> None:
    memo: Memo = {}
    plans = [
        compile_spec(
            Spec(model=Model(config={**CONFIG, "intermediate_size": ffn})),
            tmp_path / f"{ffn}.json",
            plan_only=True,
            memo=memo,
        )
        for ffn in (96, 192)
    ]
    grown = plans[1]["model"]["parameters"] - plans[0]["model"]["parameters"]
    assert grown == LAYERS * 3 * 96 * HIDDEN


# -- commands on such a plan


def test_inspect_explain_diff_and_report(compiled: Compile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled({**config(), "name": "tiny"}, to="a.json")
    compiled({**config(num_hidden_layers=3), "name": "tiny"}, to="b.json")
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert main(["inspect", a]) == 0
    shown = capsys.readouterr().out
    assert "tiny (llama)" in shown and "a config alone, in the spec" in shown and "checkpoint " not in shown
    assert main(["inspect", a, "--weight", "*.0.mlp.down_proj"]) == 0
    assert "planned model.layers.0.mlp.down_proj 64×96 bf16" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", a, "kv_pool"]) == 0
    assert "bytes_per_token 256" in capsys.readouterr().out  # 2 layers x 2 of 2 heads of 16 channels x 2 bytes
    assert main(["diff", a, b, "--exit-code"]) == 1
    assert "num_hidden_layers" in capsys.readouterr().out
    assert main(["report", a, b, "-o", str(tmp_path / "plan.html")]) == 0
    assert "<html" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize("command", ["run", "bench", "verify"])
def test_a_plan_does_not_run(
    command: str, compiled: Compile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled(config(), to="plan.json")
    more = ["--prompt", "x"] if command == "run" else []
    said: list[str] = []
    for place in (tmp_path, tmp_path / "plan.json"):
        assert main([command, str(place), *more]) == 2
        said.append(capsys.readouterr().err.replace(str(tmp_path), "DIR"))
    assert said == [
        "error: DIR: a plan alone, which cannot run; `tapeout compile` without --plan-only makes an artifact\n",
        "error: DIR/plan.json: is a file; an artifact is a folder with a manifest.json, and a plan alone cannot run\n",
    ]
