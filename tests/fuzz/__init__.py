"""Random cases of everything that a user may pass: ``make fuzz``.

Each module has one target: a function ``case`` that takes a ``Draw`` and raises ``AssertionError`` for a
finding. ``__main__.py`` runs cases in child processes, so that a crash is a finding too.
"""
