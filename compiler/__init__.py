"""The compiler: from a spec and a checkpoint to a plan and an artifact."""
