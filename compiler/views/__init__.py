"""What people see of a plan; everything here reads plan.json alone."""

from __future__ import annotations

from tapeout.compiler.views.explain import print_decisions
from tapeout.compiler.views.inspect import print_plan, print_summary
from tapeout.compiler.views.plan_file import Plan, load_plan
from tapeout.compiler.views.weights import print_weights

__all__ = ["Plan", "load_plan", "print_decisions", "print_plan", "print_summary", "print_weights"]
