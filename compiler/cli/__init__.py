"""The ``tapeout`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tapeout.runtime import cli as runtime
from tapeout.runtime.errors import TapeoutError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a difference found, 2 for an error, 130 interrupted.

    With the base install alone ``run`` and ``bench`` work; the other commands say what to install.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] in (["run"], ["bench"]):
            return runtime.main(words)
        from tapeout.compiler.cli.app import command  # noqa: PLC0415 - the base install lacks what it imports

        command()(args=words, prog_name="tapeout")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except (TapeoutError, OSError, ModuleNotFoundError) as error:
        print(f"error: {_sentence(error)}", file=sys.stderr)
        return 2
    return 0


def _sentence(error: TapeoutError | OSError | ModuleNotFoundError) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"this command needs {error.name}, which is not installed; pip install 'tapeout[compiler]'"
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return "; ".join((str(error), *getattr(error, "__notes__", ())))
