"""Opens a GPU artifact: device and files are looked at side by side, and refusals come before any weight is read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from tapeout.runtime.backend import Opened
from tapeout.runtime.cuda.backend import CudaBackend
from tapeout.runtime.cuda.driver import Driver
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.manifest import open_manifest
from tapeout.runtime.tokenizer import load_tokenizer

T = TypeVar("T")


def open_cuda(
    folder: Path, architectures: Sequence[str], target: str | None, *, device: int, threads: int, graphs: bool
) -> Opened:
    """Bind an artifact that holds code for ``architectures`` to a GPU. Raises TapeoutError; nothing is left then."""
    opening = _Background(lambda: _open_device(folder, architectures, target, device))
    try:
        manifest = open_manifest(folder, host_targets=architectures)
        manifest.verify(name for name in manifest.files if not name.startswith("weights/"))
        plan = json.loads((folder / "plan.json").read_bytes())
        tokenizer = load_tokenizer(folder)
    except BaseException:
        opening.undo(lambda opened: opened[0].close())
        raise
    driver, architecture = opening.result()
    try:
        _check_multiprocessors(driver, plan)
        driver.open()
        backend = CudaBackend(driver, manifest, plan, architecture, threads, graphs)
    except BaseException:
        driver.close()
        raise
    return Opened(plan, tokenizer, backend, architecture, driver.name, threads, backend.finish)


def _open_device(folder: Path, architectures: Sequence[str], target: str | None, device: int) -> tuple[Driver, str]:
    """The GPU with its context, and which of the artifact's architectures it is to run."""
    driver = Driver(device)
    targets = driver.targets
    if target is not None:
        if target not in targets:
            raise TapeoutError(
                f"GPU {device} ({driver.name}) does not run target {target}; it runs {', '.join(targets)}"
            )
        targets = [target]
    chosen = next((name for name in targets if name in architectures), None)
    if chosen is None:
        raise TapeoutError(
            f"{folder}: the artifact holds code for {', '.join(architectures)}, but GPU {device} ({driver.name}) runs "
            f"{', '.join(targets)}; compile it for this GPU, or choose another with device"
        )
    try:
        driver.retain()
    except BaseException:
        driver.close()
        raise
    return driver, chosen


def _check_multiprocessors(driver: Driver, plan: Mapping[str, Any]) -> None:
    """Blocks of a launch may wait for one another, so there must be room for as many as the plan counts on."""
    needed = plan["kernels"].get("multiprocessors", 0)
    if driver.multiprocessors < needed:
        raise TapeoutError(
            f"the artifact was planned for a GPU of {needed} multiprocessors, but GPU {driver.ordinal} ({driver.name}) "
            f"has {driver.multiprocessors}; compile it for this GPU, or choose another with device"
        )


class _Background(Generic[T]):
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._value, self._error = call, list[T](), list[BaseException]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:
            self._error.append(error)

    def result(self) -> T:
        """Wait for what the call returned or raised."""
        self._thread.join()
        if self._error:
            raise self._error[0]
        return self._value[0]

    def undo(self, how: Callable[[T], None]) -> None:
        """Wait, and undo what the call did."""
        self._thread.join()
        for value in self._value:
            how(value)
