"""Example specs and hardware profiles, shipped as data."""
