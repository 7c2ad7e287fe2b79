"""Checks of every kernel and class on a GPU: ``python -m oxidion gpu-check``."""
