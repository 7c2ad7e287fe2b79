"""Tests of the sources: layering, sizes, documentation, stub."""
