"""A compilation killed at any moment, or starved of disk, leaves the old artifact or the new one, whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapeout.runtime.manifest import open_manifest

WRITER = """
import sys
from pathlib import Path
from tapeout.compiler.artifact import ArtifactWriter
out, text = Path(sys.argv[1]), sys.argv[2].encode()
print("start", flush=True)
while True:
    with ArtifactWriter(out, force=True) as writer:
        for number in range(20):
            writer.add(f"part-{number}", text * 20000)
        writer.seal([])
    if "once" in sys.argv:
        break
"""


def writer(out: Path, text: str, *more: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(out), text, *more], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "start\n"
    return process


def content(out: Path) -> str:
    """The one text that every part of a whole artifact repeats."""
    open_manifest(out, host_targets=[]).verify()
    texts = {(out / f"part-{number}").read_bytes()[:3].decode() for number in range(20)}
    assert len(texts) == 1
    return texts.pop()


def test_kill_at_any_moment(tmp_path: Path) -> None:
    out = tmp_path / "artifact"
    assert writer(out, "old", "once").wait() == 0
    rng = random.Random(0)
    seen: list[str] = []
    for turn in range(12):
        process = writer(out, f"n{turn % 10}{turn // 10}")
        time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen.append(content(out))
    assert len(os.listdir(tmp_path)) <= 2, "remains of dead compilations pile up"
    assert writer(out, "end", "once").wait() == 0
    assert content(out) == "end" and os.listdir(tmp_path) == ["artifact"]


def test_interrupt_removes_the_temporary_folder(tmp_path: Path) -> None:
    out = tmp_path / "artifact"
    process = writer(out, "new")
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.wait()
    assert set(os.listdir(tmp_path)) <= {"artifact"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk(small_disk: Path) -> None:
    from tapeout.compiler.artifact import ArtifactWriter
    from tapeout.runtime.errors import TapeoutError

    out = small_disk / "artifact"
    assert writer(out, "old", "once").wait() == 0
    with pytest.raises(TapeoutError) as caught, ArtifactWriter(out, force=True, needed_bytes=1000) as new:
        for number in range(100):
            new.add(f"part-{number}", bytes(100_000))
    assert str(caught.value).startswith(f"{out}: the disk became full during the compilation (it needs 0 MB, ")
    assert content(out) == "old" and os.listdir(small_disk) == ["artifact"]
    with pytest.raises(TapeoutError, match="the artifact needs 50 MB and . MB are free there"):
        ArtifactWriter(out, force=True, needed_bytes=50_000_000).__enter__()
