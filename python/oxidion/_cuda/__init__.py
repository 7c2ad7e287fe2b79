"""Devices, their streams, and steps captured in a CUDA graph."""
