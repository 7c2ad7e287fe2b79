"""Naive float64 steps of the optimizers, one parameter at a time, straight from the equations.

Every step has the signature ``step(param, grad, state, group)`` and updates ``param`` and ``state`` in place.
``param`` and ``grad`` are float64 tensors of one shape; ``group`` holds the hyper-parameters under the keys
of a parameter group; ``state`` uses one set of role names for all classes: ``momentum``, ``variance``,
``max_variance`` (with ``amsgrad``), ``step``, ``variance_neuron``, ``Q`` (Dion), and those that a file names.
Missing entries except ``Q`` start at zero.

``verify()`` and the tests compare the core with these functions, which call it for its random numbers only.
"""
