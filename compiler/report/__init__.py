"""``report``: a plan, or two side by side, as one HTML page that loads nothing."""

from __future__ import annotations

from tapeout.compiler.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
