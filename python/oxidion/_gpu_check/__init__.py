"""What ``python -m oxidion gpu-check`` does: a report of how the package works on a GPU."""
