"""What a model needs of the machine that runs its steps; the CPU and the CUDA driver each serve it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tapeout.runtime.errors import TapeoutError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tapeout.runtime.sequence import KvSequence
    from tapeout.runtime.tokenizer import Tokenizer


class LaunchList(Protocol):
    """One launch list of the plan, bound to the addresses of this process."""

    name: str
    phase: str
    rows: int
    plan: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Rectangle:
    """Part of a buffer: ``rows`` rows of ``width`` bytes each, ``pitch`` bytes apart."""

    rows: int
    width: int
    pitch: int

    @property
    def span(self) -> int:
        """Bytes from the first to the last."""
        return (self.rows - 1) * self.pitch + self.width


FLOAT_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
X8_GROUP = 44  # bytes of 32 quantized activations: codes, scale and sums


def output_part(launch: Mapping[str, Any], rows: int) -> Rectangle:
    """What a launch of the plan writes of its output for ``rows`` rows; x8 activations (tapeout_cpu.h) as a whole."""
    output, width = launch["output"], output_width(launch)
    if output["kind"] == "x8":
        nbytes = -(-width // 32) * output["cap"] * output["terms"] * X8_GROUP
        return Rectangle(1, nbytes, nbytes)
    size = FLOAT_BYTES[output["kind"]]
    return Rectangle(rows, size * width, size * output["stride"])


def output_width(launch: Mapping[str, Any]) -> int:
    """Columns of a launch's output that hold values."""
    return max(made["columns"][1] for made in launch["produces"])


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of device memory. ``planned`` is what the plan says, ``used`` what the device lost since before the load.

    Their difference is code, graphs and rounding. ``context`` is what the driver takes for itself, whatever the model;
    other processes on the same device count in it.
    """

    planned: int
    used: int
    context: int
    total: int


class Backend(Protocol):
    """Owns all memory of one artifact and runs its steps. Sequences have their pages before a step is asked for."""

    @property
    def lists(self) -> Sequence[LaunchList]:
        """The plan's launch lists."""
        ...

    def prefill(self, sequence: KvSequence, tokens: Sequence[int], sample: bool) -> int:
        """Append tokens to a sequence; with ``sample``, choose the token behind them. Returns the step's ticket."""
        ...

    def decode(self, sequences: Sequence[KvSequence], tokens: Sequence[int] | None) -> int:
        """Append a token to each sequence and choose the next of each; returns the step's ticket.

        ``tokens`` None means those that the step before chose, which the host need not know yet (see ``continues``).
        """
        ...

    def sampled(self, ticket: int) -> list[int]:
        """The tokens a step chose, once. Raises TapeoutError when the numbers broke."""
        ...

    def drop(self, ticket: int) -> None:
        """Forget a step's tokens."""
        ...

    def continues(self, sequences: Sequence[KvSequence]) -> bool:
        """Whether ``decode`` of these sequences may be called before the tokens of the last step are known here."""
        ...

    def stage(self, sequence: KvSequence, tokens: Sequence[int], phase: str = "prefill") -> None:
        """Make the inputs of a step without running it: consecutive tokens of one sequence."""
        ...

    def stage_head(self, first: int, count: int) -> None:
        """Ask for the logits of rows of the step that ran last."""
        ...

    def logits(self, first: int, out: npt.NDArray[np.float32]) -> None:
        """Logits of ``len(out)`` rows, from ``first`` on, of the step that ran last."""
        ...

    def run_one(self, launches: LaunchList, index: int) -> None:
        """One launch of a list over the staged inputs; returns when it is done."""
        ...

    def poison(self, arg: Any, part: Rectangle) -> None:
        """Fill memory that a plan argument points at with ones, which are NaN in every float type."""
        ...

    def read(self, arg: Any, part: Rectangle) -> npt.NDArray[np.uint8]:
        """A copy of all bytes from the first to the last of what a plan argument points at."""
        ...

    def device_memory(self) -> DeviceMemory | None:
        """Device memory held; None where there is no device."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Give everything back. ``error`` is what ended this process's part too early, for other ranks to know."""
        ...


@dataclass(frozen=True)
class Opened:
    """An artifact bound to a machine. ``finish`` waits for what is still being checked and raises TapeoutError."""

    plan: dict[str, Any]
    tokenizer: Tokenizer
    backend: Backend
    target: str
    device: str
    threads: int
    finish: Callable[[], None]


def largest(lists: Sequence[LaunchList], phase: str) -> int:
    """Most rows that any launch list of a phase is planned for; 0 without one."""
    return max((entry.rows for entry in lists if entry.phase == phase), default=0)


def smallest_fitting(lists: Sequence[Any], phase: str, rows: int) -> Any:
    """The smallest launch list of a phase that holds ``rows`` rows. Raises TapeoutError when none does."""
    fitting = [entry for entry in lists if entry.phase == phase and entry.rows >= rows]
    if not fitting:
        raise TapeoutError(
            f"{rows} rows in one {phase} step are more than the {largest(lists, phase)} "
            "that the artifact was planned for"
        )
    return min(fitting, key=lambda entry: entry.rows)
