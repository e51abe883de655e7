"""Device profiles: what the compiler knows about the hardware that an artifact is for."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tapeout.compiler.spec.document import read_document
from tapeout.compiler.spec.fields import Section, Size
from tapeout.compiler.spec.violations import validate
from tapeout.runtime.errors import TapeoutError

Positive = Annotated[float, Field(gt=0)]


class Device(Section):
    """One device. Rates are ceilings that were measured with the instructions that the kernels use."""

    name: str
    """Name of the profile, the one that topology.device gives."""
    kind: Literal["cpu"]
    """Which backend runs it."""
    targets: Annotated[tuple[Literal["x86_64_v3", "x86_64_v4"], ...], Field(min_length=1)]
    """Instruction sets that kernels are built for, from the most to the least widely available."""
    memory: Size
    """Bytes that an artifact may plan with."""
    threads: Annotated[int, Field(ge=1)]
    """Threads that the rates below were measured with, and that plans are costed for."""
    bandwidth_gb_s: Positive
    """Bytes read from memory by all threads together, 10^9 a second."""
    bandwidth_one_thread_gb_s: Positive
    """The same for one thread."""
    int8_gops_per_core: Positive
    """int8 dot products accumulated in 32 bits, 10^9 operations a second (a multiply and an add are two)."""
    int8_pairs_gops_per_core: Positive
    """The same with 16-bit accumulation of pairs, where the codes are small enough for it."""
    f32_gflops_per_core: Positive
    """float32 fused multiply-add, 10^9 operations a second."""
    source: str
    """Where the figures come from."""


def profile_folder() -> Path:
    """The folder of the profiles that ship with the compiler."""
    return Path(str(files("tapeout.specs"))) / "devices"


def known_devices() -> list[str]:
    """Names of all profiles."""
    return sorted(path.stem for path in profile_folder().glob("*.yaml"))


def load_device(name: str) -> Device:
    """The profile called ``name``. Raises TapeoutError listing the known ones."""
    known = known_devices()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise TapeoutError(f"topology.device: no profile is called {name!r}; {hint}known: {', '.join(known)}")
    device = validate(Device, read_document(profile_folder() / f"{name}.yaml"))
    if device.name != name:
        raise TapeoutError(f"{profile_folder() / name}.yaml: name is {device.name!r}, but the file is called {name}")
    return device
