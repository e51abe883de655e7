"""The ``tapeout`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tapeout.runtime.errors import TapeoutError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a difference found, 2 for an error, 130 interrupted."""
    from tapeout.compiler.cli.app import command  # noqa: PLC0415 - typer is not needed to import this package

    try:
        command()(args=None if argv is None else list(argv), prog_name="tapeout")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    except TapeoutError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _fail(f"{error.strerror or error}{where}")
    return 0


def _fail(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2
