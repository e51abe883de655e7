"""Artifacts for several ranks, broken: one sentence says what is wrong, whichever rank meets it."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from workspace import Workspace

from tapeout.compiler.cli import main
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.host import host_targets
from tapeout.runtime.ranks import Segment

pytestmark = pytest.mark.skipif(not host_targets(), reason="this CPU runs no kernel of the test")


@pytest.fixture(scope="module")
def compiled(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact for two ranks; not to be changed."""
    artifact = tmp_path_factory.mktemp("ranks") / "artifact"
    spec = Workspace(artifact.parent).spec(sound / "model.gguf", topology={"count": 2})
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["compile", str(spec), "-o", str(artifact), "--no-cache"]) == 0
    return artifact


@pytest.fixture
def artifact(compiled: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(compiled, tmp_path / "artifact"))


def run(artifact: Path, *words: str, text: bytes = b"The", environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The exit code of ``tapeout run`` of a prompt, and what it says on standard error."""
    words = (str(artifact), "--prompt=-", "--max-tokens=2", "--json", *words)
    ended = subprocess.run([sys.executable, "-m", "tapeout.runtime", *words], input=text, capture_output=True,
                           env={**os.environ, **(environ or {})}, timeout=60, check=False)  # fmt: skip
    return ended.returncode, ended.stderr.decode()


def refused(artifact: Path, *words: str, text: bytes = b"The", environ: Mapping[str, str] | None = None) -> str:
    """What a run is refused with, in one line."""
    code, said = run(artifact, *words, text=text, environ=environ)
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said[len("error: ") : -1]


def flip(path: Path) -> str:
    """Change the last byte of a file; returns what is said of it."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return (
        f"{path}: bytes 0 to {len(data)} differ from what was compiled (digest mismatch); the file is damaged, copy "
        "the artifact again or compile it again"
    )


def test_a_damaged_plan_is_not_read(artifact: Path) -> None:
    said = flip(artifact / "plan.json")
    assert refused(artifact) == said
    (artifact / "plan.json").write_bytes(b"{")
    assert refused(artifact).startswith(f"{artifact}: plan.json has 1 bytes and should have ")


@pytest.mark.parametrize("rank", [0, 1])
def test_damaged_weights_are_named_whichever_rank_reads_them(artifact: Path, rank: int) -> None:
    said = flip(artifact / "weights" / f"rank{rank}.safetensors")
    assert refused(artifact) == (f"rank 1 failed: {said}" if rank else said)


def test_a_rank_of_another_launcher_says_what_is_damaged(artifact: Path) -> None:
    said = flip(artifact / "weights" / "rank1.safetensors")
    words = [sys.executable, "-m", "tapeout.runtime", str(artifact), "--prompt=The"]
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{os.getpid()}1"}
    ranks = [
        subprocess.Popen(words, env={**os.environ, **launcher, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert errors == [f"error: rank 1 failed: {said}\n", f"error: {said}\n"]


def test_what_every_rank_finds_is_said_once(artifact: Path) -> None:
    assert refused(artifact, "--target=z80").startswith("this CPU does not run target z80; it runs ")
    said = [flip(path) for path in sorted((artifact / "kernels").iterdir())]
    assert refused(artifact) == said[0]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "2"}, "the environment variable RANK is missing; who starts ranks sets it to a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2; ranks are numbered from 0 to 1"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "--prompt=- needs a standard input for every rank, which torchrun does not give; put the text behind "
            "--prompt, or let `tapeout run` start the ranks",
        ),
    ],
)
def test_a_launcher_that_contradicts_itself_ends_in_a_sentence(
    artifact: Path, environ: Mapping[str, str], said: str
) -> None:
    assert refused(artifact, environ=environ) == said


def test_a_prompt_may_hold_more_than_a_command_line_does(artifact: Path) -> None:
    assert refused(artifact, text=b"a" * 300_000).startswith("the prompt has ")
    assert run(artifact, text=b"a\0b") == (0, "")


def test_memory_that_the_system_does_not_give() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(TapeoutError) as caught:
            Segment.create(2, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == (
        "the system gives the ranks no shared memory of 4,263,936 bytes (File too large); raise the limits of this "
        "process, or use a machine or container that allows memfd_create"
    )


def test_memory_that_the_process_may_not_map() -> None:
    with pytest.raises(TapeoutError) as caught:
        Segment.create(2, 1 << 45)
    assert str(caught.value) == (
        "there is no room for the ranks' shared memory of 140,737,488,424,960 bytes; raise the limit of this process's "
        "address space (ulimit -v)"
    )
