"""Numerics of every algorithm against float64 references, hand-computed steps and recorded trajectories."""
