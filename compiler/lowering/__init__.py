"""Lowering: how the ops of a fused program become launches, one file a backend."""
