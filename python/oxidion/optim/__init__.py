"""The optimizer classes: signatures, defaults, documentation."""
