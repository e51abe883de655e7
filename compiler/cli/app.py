"""The commands and their options; each imports what it needs when it runs, so that help and errors are quick."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

# ruff: noqa: PLC0415 - imports stand inside the commands, see above

_app = typer.Typer(
    name="tapeout",
    help="Compile language models ahead of time: a spec in, one self-contained artifact out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="A spec file (YAML).")]
Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An artifact folder or a plan.json.")]
_PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def command() -> Callable[..., Any]:
    """The command line as a callable."""
    return typer.main.get_command(_app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"tapeout {version('tapeout')}")
        raise typer.Exit


@contextmanager
def _interrupts_said() -> Generator[None]:
    """Print what an interrupt says of what it left; typer ends the process without a word."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ()):
            print(f"interrupted; {note}", file=sys.stderr)
        raise


@_app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@_app.command("compile")
def compile_(
    spec: SpecPath,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Artifact folder; artifacts/SPEC if left out.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value of the spec; repeatable.")
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Write plan.json and stop before the weights.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder if it exists.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, metavar="N", help="Threads or workers for weights; all cores if left out."),
    ] = None,
    executor: Annotated[
        Literal["threads", "ray"],
        typer.Option("--executor", help="Who writes weights: threads here, or a Ray cluster (RAY_ADDRESS)."),
    ] = "threads",
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Reuse results of earlier compiles.")] = True,
) -> None:
    """Compile SPEC into an artifact."""
    from tapeout.compiler.cli.progress import terminal_progress
    from tapeout.compiler.driver import compile_spec
    from tapeout.compiler.spec import load_spec
    from tapeout.compiler.views import print_summary

    loaded = load_spec(spec, overrides or [])
    folder = output or Path("artifacts") / spec.stem
    with _interrupts_said(), terminal_progress() as progress:
        plan = compile_spec(
            loaded,
            folder,
            plan_only=plan_only,
            force=force,
            jobs=jobs,
            executor=executor,
            cache=cache,
            progress=progress,
        )
    print_summary(plan)
    print(f"\nwrote {folder}")


@_app.command()
def inspect(
    artifact: Annotated[
        Path | None, typer.Argument(metavar="ARTIFACT", help="An artifact folder or a plan.json.")
    ] = None,
    weight: Annotated[
        str | None, typer.Option("--weight", metavar="NAME", help="Show where this weight's bytes come from (a glob).")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", help="With --weight: on this rank; on all if left out.")
    ] = None,
    pipeline: Annotated[bool, typer.Option("--pipeline", help="Draw the graph of passes.")] = False,
) -> None:
    """Show a plan as tables: memory, formats, kernels, launch lists."""
    from tapeout.compiler.views import load_plan, print_plan, print_weights

    if pipeline:
        from tapeout.passes import PIPELINE

        print(PIPELINE.draw())
    elif artifact is None:
        raise typer.BadParameter("needed unless --pipeline is given", param_hint="ARTIFACT")
    elif weight is not None:
        print_weights(load_plan(artifact), weight, rank=rank)
    else:
        print_plan(load_plan(artifact))


@_app.command()
def explain(
    artifact: Artifact,
    subject: Annotated[
        str | None, typer.Argument(metavar="[SUBJECT]", help="Only decisions about this (a glob or part of a name).")
    ] = None,
) -> None:
    """Print a plan's decisions: why, why not otherwise, on what evidence."""
    from tapeout.compiler.views import load_plan, print_decisions

    print_decisions(load_plan(artifact), subject)


@_app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="An artifact folder or a plan.json.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The one to compare it with.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the changes as JSON.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when the plans differ.")] = False,
) -> None:
    """Print what changed between two plans, and what it costs."""
    from tapeout.compiler.diff import compare, render
    from tapeout.compiler.views import load_plan

    changes = compare(load_plan(before), load_plan(after))
    if as_json:
        print(json.dumps({"equal": not changes, "changes": [change.to_json() for change in changes]}, indent=2))
    elif changes:
        print(render(changes))
    if changes and exit_code:
        raise typer.Exit(1)


@_app.command()
def report(
    artifact: Artifact,
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER]", help="A second one, to compare with the first.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write.")] = Path(
        "plan.html"
    ),
) -> None:
    """Write a plan, or two beside each other, as one HTML page that loads nothing."""
    from tapeout.compiler.report import write_report
    from tapeout.passes import PIPELINE

    write_report([artifact, *([other] if other else [])], output, PIPELINE.passes)
    print(f"wrote {output}")


@_app.command()
def verify(
    artifact: Artifact,
    source: Annotated[
        str | None, typer.Option("--source", help="The checkpoint, where the plan's own source is not at hand.")
    ] = None,
    witness: Annotated[
        str, typer.Option("--witness", help="transformers, or onnx: the logical program in ONNX Runtime.")
    ] = "transformers",
    positions: Annotated[int, typer.Option("--positions", min=1, help="Positions to compare.")] = 512,
) -> None:
    """Compare an artifact with an independent reference, op by op."""
    from tapeout.compiler.cli.progress import terminal_progress
    from tapeout.compiler.verify import phases_of, verify_artifact

    ok = True
    for phase in phases_of(artifact):
        with terminal_progress() as progress:
            report = verify_artifact(
                artifact, source=source, witness=witness, positions=positions, phase=phase, progress=progress
            )
        print(report.text())
        ok = ok and report.ok
    if not ok:
        raise typer.Exit(1)


@_app.command("eval")
def evaluate_(
    artifacts: Annotated[list[Path], typer.Argument(metavar="ARTIFACT", help="Artifact folders; one row each.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="Plain text in UTF-8.")],
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="REFERENCE", help="An artifact, or a checkpoint for transformers to run in float32."
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", metavar="N", help="Tokens of a window; 512 or what fits if left out.")
    ] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Bench each artifact too.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads to run on; one for each CPU if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure what number formats cost: perplexity on a text, and divergence of the logits from a reference.

    The text is cut into windows side by side, each run with an empty cache and, for a model that has one, the begin
    token in front. Every token of a window counts but its first, each predicted from those before it in the window.
    """
    from tapeout.compiler.cli.progress import terminal_progress
    from tapeout.compiler.evaluation import evaluate, print_evaluation

    with terminal_progress() as progress:
        found = evaluate(
            artifacts, text, against=against, context=context, threads=threads, speed=speed, progress=progress
        )
    if as_json:
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        print_evaluation(found)


@_app.command("export-onnx")
def export_onnx_(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A spec file, or an artifact folder.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder to make; artifacts/SPEC-onnx if left out."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value of the spec; repeatable.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", help="The checkpoint of an artifact, where its own is not at hand.")
    ] = None,
    external: Annotated[
        bool, typer.Option("--external", help="Weights in a file of their own, as always above 2 GB.")
    ] = False,
) -> None:
    """Write the model of SPEC as ONNX: standard operators, float32 weights, whole sequences without a cache."""
    from tapeout.compiler.cli.progress import terminal_progress
    from tapeout.compiler.onnx.driver import export_onnx, load_any_spec

    loaded = load_any_spec(spec, overrides or [], source)
    with terminal_progress() as progress:
        folder = output or Path("artifacts") / f"{spec.stem}-onnx"
        written = export_onnx(loaded, folder, external=external, progress=progress)
    print(f"wrote {written}")


@_app.command(context_settings=_PASS_ON)
def run(context: typer.Context) -> None:
    """Generate text from an artifact."""
    from tapeout.runtime.cli import main

    raise typer.Exit(main(["run", *context.args]))


@_app.command(context_settings=_PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure an artifact's prefill and decode speed."""
    from tapeout.runtime.cli import main

    raise typer.Exit(main(["bench", *context.args]))


@_app.command()
def schema() -> None:
    """Print the JSON Schema of specs, for editors."""
    from tapeout.compiler.spec import json_schema

    print(json.dumps(json_schema(), indent=2))
