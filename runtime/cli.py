"""The commands of the runtime alone: generate from a prompt, and measure an artifact's speed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.runtime.errors import TapeoutError

if TYPE_CHECKING:
    from tapeout.runtime.model import Model

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """``[run] ARTIFACT …`` or ``bench ARTIFACT …``; returns the exit code (2 for bad input, 130 for Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words and words[0] in ("run", "bench") else "run"
    try:
        return _bench(words) if command == "bench" else _run(words)
    except TapeoutError as error:
        if not _told_by_parent(error):
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"error: {error.strerror or error}{where}", file=sys.stderr)
        return 2


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"tapeout {command}", description=description)
    parser.add_argument("artifact", type=Path, help="folder that `tapeout compile` wrote")
    parser.add_argument("--threads", type=int, help="threads to run on (default: one for each CPU of this process)")
    parser.add_argument("--target", help="kernel target to use (default: the best that this machine runs)")
    parser.add_argument(
        "--device", type=int, default=0, metavar="N", help="GPU to run on, by its number (default: 0; not for CPUs)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _run(argv: Sequence[str]) -> int:
    parser = _parser("run", "Generate text from a prompt.")
    parser.add_argument("--prompt", required=True, help="the prompt, or - to read it from standard input")
    parser.add_argument(
        "--chat", action="store_true", help="render the prompt as a user's message with the model's chat template"
    )
    parser.add_argument("--system", help="a system message for --chat")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="most tokens to generate (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens (0: all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from the smallest set with mass P (1: all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the sampler (default: 0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end when this text appears; may be repeated"
    )
    options = parser.parse_args(argv)
    prompt = _read_prompt() if options.prompt == "-" else options.prompt
    ranks = _ranks(options)
    if ranks:
        return _start(ranks, ["run", *argv], prompt if options.prompt == "-" else None)

    from tapeout.runtime.model import load

    with load(options.artifact, threads=options.threads, target=options.target, device=options.device) as model:
        ids = _prompt_ids(model, prompt, options)
        return _generate(model, ids, options)


def _read_prompt() -> str:
    """Standard input. Raises TapeoutError under launchers that hand it to one rank, or to none."""
    from tapeout.runtime.model import rank_place

    place = rank_place()
    if place and place.parent is None and not place.job.startswith("srun/"):
        raise TapeoutError(
            f"--prompt=- needs a standard input for every rank, which {place.job.partition('/')[0]} does not give; put "
            "the text behind --prompt, or let `tapeout run` start the ranks"
        )
    return sys.stdin.read()


def _told_by_parent(error: TapeoutError) -> bool:
    """Whether the process that started this rank says why the run is over."""
    from tapeout.runtime.ranks import RankError
    from tapeout.runtime.ranks.environment import PARENT

    return isinstance(error, RankError) and PARENT in os.environ


def _ranks(options: argparse.Namespace) -> Mapping[str, int] | None:
    """What the plan says of its ranks, where it is for several and this process is to start them."""
    from tapeout.runtime.host import host_targets, thread_count
    from tapeout.runtime.manifest import open_manifest, parse_manifest
    from tapeout.runtime.model import rank_place

    if "weights/rank1.safetensors" not in parse_manifest(options.artifact).files or rank_place():
        return None
    thread_count(options.threads)  # said once, and not by every rank
    open_manifest(options.artifact, host_targets=host_targets()).verify(["plan.json"])
    plan = json.loads((options.artifact / "plan.json").read_bytes())
    return plan["memory"]["comm"]


def _start(comm: Mapping[str, int], words: Sequence[str], text: str | None = None) -> int:
    """Run the command once as every rank; the first one's output is the command's. ``text`` is what each reads."""
    from tapeout.runtime.ranks import run_ranks

    command = [sys.executable, "-m", "tapeout.runtime", *words]
    read = None if text is None else text.encode(sys.stdin.encoding, sys.stdin.errors or "strict")
    return run_ranks(comm["ranks"], command, comm["buffer_bytes"], stdin=read)


def _prompt_ids(model: Model, prompt: str, options: argparse.Namespace) -> list[int]:
    if not options.chat:
        if options.system is not None:
            raise TapeoutError("--system needs --chat; a plain prompt has no roles")
        return model.tokenizer.encode(prompt)
    from tapeout.runtime.chat import chat_ids

    messages = [{"role": "system", "content": options.system}] if options.system is not None else []
    return chat_ids(model.folder, model.tokenizer, [*messages, {"role": "user", "content": prompt}])


def _generate(model: Model, ids: list[int], options: argparse.Namespace) -> int:
    generation = model.generate(
        ids,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=options.stop,
    )
    texts: list[str] = []
    reason = "interrupted"
    try:
        for step in generation:
            texts.append(step.text)
            reason = step.finish_reason or reason
            if not options.json:
                sys.stdout.write(step.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        generation.close()
    result: dict[str, Any] = {
        "prompt_tokens": len(ids),
        "tokens": generation.tokens,
        "text": "".join(texts),
        "finish_reason": reason,
        "timings": {"load_s": round(model.load_s, 4)}
        | {key: round(value, 4) for key, value in generation.timings.items()},
        "peak_rss_bytes": peak_rss(),
    }
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        _summary(result)
    return INTERRUPTED if reason == "interrupted" else 0


def _summary(result: dict[str, Any]) -> None:
    times = result["timings"]
    print(flush=True)
    print(
        f"[{result['prompt_tokens']} prompt tokens at {times['prefill_tok_s']:.0f} tok/s, "
        f"{len(result['tokens'])} generated at "
        f"{times['decode_tok_s']:.0f} tok/s, ended by {result['finish_reason']}; loaded in {times['load_s']:.2f} s, "
        f"{result['peak_rss_bytes'] / 2**20:.0f} MiB at peak]",
        file=sys.stderr,
    )


def peak_rss() -> int:
    """Most resident bytes this process has held."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _bench(argv: Sequence[str]) -> int:
    parser = _parser("bench", "Measure prefill and decode speed; medians of several runs.")
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, metavar="N", help="length of the prompt (default: 512)"
    )
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens to generate (default: 128)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs to take the median of (default: 5)")
    options = parser.parse_args(argv)
    ranks = _ranks(options)
    if ranks:
        return _start(ranks, ["bench", *argv])

    from tapeout.runtime.bench import bench_model
    from tapeout.runtime.model import load

    with load(options.artifact, threads=options.threads, target=options.target, device=options.device) as model:
        result = bench_model(model, options.prompt_tokens, options.max_tokens, options.repeats)
        result["load_s"], result["peak_rss_bytes"] = round(model.load_s, 4), peak_rss()
        held = model.device_memory()
        result["device_memory"] = asdict(held) if held else None
    if options.json:
        print(json.dumps(result))
        return 0
    place = result["device"] if result["device_memory"] else f"{result['threads']} threads"
    print(f"{options.artifact}: {result['target']}, {place}, medians of {options.repeats}")
    for name, figure in (("prefill", "prefill_tok_s"), ("decode", "decode_tok_s")):
        runs = result[f"{figure}_runs"]
        tokens, spread = result[f"{name}_tokens"], f"({min(runs):.1f} to {max(runs):.1f})"
        print(f"  {name:<8} {tokens:>5} tokens  {result[figure]:>9.1f} tok/s  {spread}")
    print(f"  decode reads {result['bytes_per_token'] / 1e6:.1f} MB a token: {result['decode_gb_s']:.1f} GB/s")
    print(f"  load     {result['load_s']:.3f} s, {result['peak_rss_bytes'] / 2**20:.0f} MiB at peak")
    if result["device_memory"]:
        _device_memory(**result["device_memory"])
    return 0


def _device_memory(planned: int, used: int, context: int, total: int) -> None:
    mib = [f"{size / 2**20:.1f}" for size in (used, planned, used - planned, context, total)]
    print(
        f"  memory   {mib[0]} MiB of the device: {mib[1]} planned, {mib[2]} of code and graphs; "
        f"the driver and others hold {mib[3]} of {mib[4]} besides"
    )
