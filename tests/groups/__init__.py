"""Which parameters of models as people have them go where."""
