"""Splitting a model over ranks: what each axis becomes, which weights are cut, and where ranks must exchange values."""
