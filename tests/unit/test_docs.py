"""The documents against the code: links, paths, commands, options, excerpts, and the tables that list things."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import compile_tiny

from tapeout.compiler import cli
from tapeout.compiler.devices import load_device
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.models import FAMILIES
from tapeout.compiler.plan import build_plan
from tapeout.compiler.spec import Model, Spec, load_spec
from tapeout.runtime import cli as runtime_cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:\.ci|compiler|passes|runtime|specs|tests|docs)/[\w./-]*)`")
FENCE = re.compile(r"^(?:<!-- excerpt: (?P<source>\S+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
COMMANDS = ("compile", "inspect", "explain", "diff", "report", "verify", "eval", "export-onnx", "run", "bench",
            "schema")  # fmt: skip


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def blocks(name: str, kind: str) -> list[str]:
    return [match["text"] for match in FENCE.finditer(text(name)) if match["kind"] == kind]


def command_lines(name: str) -> Iterator[list[str]]:
    """Every shell line of a document's plain blocks that starts one of our commands, as words."""
    for block in blocks(name, ""):
        for line in block.splitlines():
            words = (
                shlex.split(line.removeprefix("$ "), comments=True) if re.match(r"(\$ )?(tapeout|make) ", line) else []
            )
            if words:
                yield words


@pytest.mark.parametrize("name", NAMES)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    prose = FENCE.sub("", text(name))
    links = [link.partition("#")[0] for link in LINK.findall(prose) if "://" not in link]
    missing = [link for link in links if link and not ((ROOT / name).parent / link).exists()]
    paths = [path for path in PATH.findall(prose) if not re.search("NAME|TARGET", path)]
    assert missing + [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_options_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    targets = re.findall(r"^([\w-]+):", text("Makefile"), re.M)
    for program, command, *rest in command_lines(name):
        if program == "make":
            assert command in targets
            continue
        assert command in COMMANDS
        known = help_of(command, capsys)
        options = [word.partition("=")[0] for word in rest if word.startswith("-")]
        assert [option for option in options if not re.search(rf"(?<!\w){option}\b", known)] == []


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    if command in ("run", "bench"):
        with pytest.raises(SystemExit):
            runtime_cli.main([command, "--help"])
    else:
        assert cli.main([command, "--help"]) == 0
    return capsys.readouterr().out


def test_excerpts_are_the_code() -> None:
    found = [match for match in FENCE.finditer(text("CONTRIBUTING.md")) if match["source"]]
    assert len(found) >= 10
    assert [match["text"] for match in found if match["text"] not in text(match["source"])] == []


def test_the_code_map_misses_no_package() -> None:
    packages = {
        path.parent.relative_to(ROOT)
        for root in ("compiler", "passes", "runtime")
        for path in (ROOT / root).rglob("*.py")
    }
    linked = {Path(link) for link in LINK.findall(text("README.md")) if "://" not in link}
    mapped = {part for link in linked for part in (link, *link.parents)}
    assert sorted(str(package) for package in packages - mapped) == []


def test_the_spec_of_the_readme_is_valid(tmp_path: Path) -> None:
    (spec,) = blocks("README.md", "yaml")
    (tmp_path / "my.yaml").write_text(spec)
    loaded = load_spec(tmp_path / "my.yaml")
    assert [rule.format for rule in loaded.quantization.rules] == ["q8_0", "q6_k"]


def test_the_python_of_the_readme_parses() -> None:
    (code,) = blocks("README.md", "python")
    compile(code, "README.md", "exec")


def test_tables_list_what_there_is() -> None:
    rows = dict(re.findall(r"^\| (families|formats read|formats written|targets) \| (.*) \|$", text("README.md"), re.M))
    in_files = [name for name, known in FORMATS.items() if known.gguf_id is not None]
    assert rows["formats read"].lower().split(", ") == in_files
    written = [name for name, known in FORMATS.items() if known.encode is not None]
    left_out = set(in_files) - set(written)
    assert set(re.findall(r"\bi?q\d_\w+", rows["formats written"].lower())) == left_out
    own = [name for name in written if name not in in_files]
    assert rows["formats written"].partition("of our own also ")[2].split(", ") == own
    squeezed = re.sub(r"[ .-]", "", rows["families"].lower())
    assert [name for name in FAMILIES if name.replace("_", "") not in squeezed] == []
    assert set(re.findall(r"`(x86_64_\w+)`", rows["targets"])) == set(load_device("cpu").targets)


def test_the_sections_of_the_plan_are_described() -> None:
    results = compile_tiny()
    plan = build_plan(Spec(model=Model(source="tiny")), load_device("cpu"), results, {}, [])
    described = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text("docs/plan.md").partition("## Weights")[0], re.M)
    assert {name.strip("`") for cell in described for name in cell.split(", ")} == set(plan)


def test_the_changelog_has_the_version_of_the_package() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', text("pyproject.toml"), re.M)
    assert f"## [{version}]" in text("CHANGELOG.md")


@pytest.mark.parametrize("name", NAMES)
def test_no_document_names_a_place_on_a_machine(name: str) -> None:
    assert re.findall(r"/(?:home|root|work|tmp|Users)/\S*", text(name)) == []
