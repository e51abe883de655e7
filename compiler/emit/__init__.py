"""Emission: from the recipes of a plan to the bytes of an artifact's weights file (``weights.emit_weights``)."""
