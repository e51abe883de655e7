"""``python -m tapeout.runtime ARTIFACT --prompt TEXT``: generation with the base install alone."""

from __future__ import annotations

import sys

from tapeout.runtime.cli import main

sys.exit(main())
