"""The command line: options, exit codes, one-line errors, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plan_example import example_plan

from tapeout.compiler import cli
from tapeout.compiler.cli.progress import terminal_progress
from tapeout.compiler.progress import SilentProgress
from tapeout.runtime.errors import TapeoutError

SPECS = Path(__file__).parents[2] / "specs"


@pytest.fixture
def plans(tmp_path: Path) -> tuple[str, str]:
    """An artifact folder, and the plan.json of a slightly different one."""
    plan = example_plan()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plan.json").write_text(json.dumps(plan))
    plan["spec"]["serving"]["max_sequences"] = 4
    (tmp_path / "b.json").write_text(json.dumps(plan))
    return str(tmp_path / "a"), str(tmp_path / "b.json")


def test_help_names_every_command(capsys) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("compile", "inspect", "explain", "diff", "report", "verify", "eval", "export-onnx", "run", "bench"):
        assert f"\n  {name} " in text


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tapeout.compiler.cli import main; main(['--help']); "
        "print(sorted({'numpy', 'pydantic', 'ruamel', 'networkx', 'torch', 'gguf'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_version(capsys) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "tapeout 0.1.0\n"


def test_unknown_option_and_missing_argument_exit_with_2(capsys) -> None:
    assert cli.main(["diff", "--nope"]) == 2
    assert cli.main(["explain"]) == 2
    assert "Missing argument" in capsys.readouterr().err


def test_schema_prints_json(capsys) -> None:
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Tapeout spec"


def test_diff_exit_codes(plans: tuple[str, str], capsys) -> None:
    a, b = plans
    assert cli.main(["diff", a, a, "--exit-code"]) == 0
    assert capsys.readouterr().out == ""
    assert cli.main(["diff", a, b]) == 0
    assert capsys.readouterr().out == "spec\n  serving.max_sequences  1 → 4\n"
    assert cli.main(["diff", a, b, "--exit-code"]) == 1


def test_diff_json(plans: tuple[str, str], capsys) -> None:
    a, b = plans
    assert cli.main(["diff", a, a, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"equal": True, "changes": []}
    assert cli.main(["diff", a, b, "--json", "--exit-code"]) == 1
    change = {
        "section": "spec",
        "subject": "serving.max_sequences",
        "before": "1",
        "after": "4",
        "effect": "",
        "bytes": None,
    }
    assert json.loads(capsys.readouterr().out) == {"equal": False, "changes": [change]}


def test_inspect_and_explain_read_plan_json_alone(plans: tuple[str, str], capsys) -> None:
    assert cli.main(["inspect", plans[0]]) == 0
    assert "prefill.256, decode.1: 9 launches" in capsys.readouterr().out
    assert cli.main(["inspect", plans[1], "--weight", "model.norm"]) == 0
    assert "read output_norm.weight 576 f32" in capsys.readouterr().out
    assert cli.main(["explain", plans[0], "kv_pool"]) == 0
    assert "kv_pool → f16, pages of 32 tokens" in capsys.readouterr().out


def test_inspect_needs_an_artifact_or_pipeline(capsys) -> None:
    assert cli.main(["inspect"]) == 2
    assert cli.main(["inspect", "--pipeline"]) == 0
    assert "ingest" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory; give an artifact folder or its plan.json"),
        ("{", "not a plan: Expecting"),
        ("[]", "not a plan: it has no format_version"),
        ('{"format_version": 99}', "plan format 99, but this version reads format 2"),
        (
            '{"format_version": 2, "spec": {}}',
            "sections are missing: model, weights, recipes, kernels, memory, communication, graphs, decisions",
        ),
    ],
)
def test_a_bad_plan_is_one_sentence(tmp_path: Path, capsys, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    assert cli.main(["inspect", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {tmp_path}") and message in text and text.count("\n") == 1


def test_a_bad_spec_is_one_sentence(tmp_path: Path, capsys) -> None:
    spec = tmp_path / "s.yaml"
    spec.write_text("model: {source: a.gguf}\nservings: {}\n")
    assert cli.main(["compile", str(spec), "-o", str(tmp_path / "out")]) == 2
    keys = "model, quantization, serving, topology"
    expected = f"error: {spec}:2: servings: unknown key; did you mean serving? keys here: {keys}\n"
    assert capsys.readouterr().err == expected


def _command_raising(error: BaseException):
    def command():
        def call(**_: Any) -> None:
            raise error

        return call

    return command


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (TapeoutError("what, where, the rule"), 2, "error: what, where, the rule\n"),
        (KeyboardInterrupt(), 130, ""),
        (OSError(28, "No space left on device", "/x"), 2, "error: No space left on device: /x\n"),
        (SystemExit(1), 1, ""),
    ],
)
def test_exit_codes(monkeypatch, capsys, error: BaseException, code: int, text: str) -> None:
    monkeypatch.setattr("tapeout.compiler.cli.app.command", _command_raising(error))
    assert cli.main([]) == code
    assert capsys.readouterr().err == text


def test_compile_passes_its_options_on(monkeypatch, tmp_path: Path, capsys) -> None:
    calls: list[tuple[Any, ...]] = []

    def compile_spec(spec, output, **options):
        calls.append((spec, output, options))
        return example_plan()

    monkeypatch.setattr("tapeout.compiler.driver.compile_spec", compile_spec)
    spec = str(SPECS / "smollm2-135m-cpu.yaml")
    overrides = ["--set", "serving.max_context=512", "--set", "serving.max_sequences=2"]
    assert (
        cli.main(["compile", spec, *overrides, "--plan-only", "--force", "--jobs=1", "--executor=ray", "--no-cache"])
        == 0
    )
    loaded, output, options = calls[0]
    assert (loaded.serving.max_context, loaded.serving.max_sequences) == (512, 2)
    assert output == Path("artifacts/smollm2-135m-cpu")
    del options["progress"]
    assert options == {"plan_only": True, "force": True, "jobs": 1, "executor": "ray", "cache": False}
    assert capsys.readouterr().out.endswith("wrote artifacts/smollm2-135m-cpu\n")


@pytest.mark.parametrize("name", ["run", "bench"])
def test_run_and_bench_belong_to_the_runtime(monkeypatch, name: str) -> None:
    seen: list[list[str]] = []

    def runtime(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    monkeypatch.setattr("tapeout.runtime.cli.main", runtime)
    assert cli.main([name, "folder", "--prompt", "a b", "--json", "--help"]) == 7
    assert seen == [[name, "folder", "--prompt", "a b", "--json", "--help"]]


def test_progress_prints_a_line_a_task_where_there_is_no_terminal(capsys) -> None:
    with terminal_progress() as progress, progress.task("weights", 3 << 20, "B") as task:
        task.advance(1 << 20)
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith("weights: 3.0 MiB in 0.0")
    with pytest.raises(KeyError), terminal_progress() as progress, progress.task("passes", 6):
        raise KeyError
    assert capsys.readouterr().err == ""


def test_silent_progress_is_silent(capsys) -> None:
    with SilentProgress().task("x", 1) as task:
        task.advance(1)
    assert capsys.readouterr() == ("", "")


def without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in an interpreter that lacks a module."""
    main = f"from tapeout.compiler.cli import main; sys.exit(main({arguments!r}))"
    code = f"import sys; sys.modules[{module!r}] = None; {main}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_base_install_runs_artifacts_and_says_what_the_rest_needs(tmp_path: Path) -> None:
    compiled = without("typer", "compile", "spec.yaml")
    assert compiled.returncode == 2
    assert compiled.stderr == (
        "error: this command needs typer, which is not installed; pip install 'tapeout[compiler]'\n"
    )
    ran = without("typer", "run", str(tmp_path / "none"), "--prompt", "x")
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"error: {tmp_path / 'none'}: no such folder")
