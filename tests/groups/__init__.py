"""Tests of how parameters of models as people have them are sorted."""
