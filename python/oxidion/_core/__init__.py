"""One step of an optimizer: its groups, its state, its plan, and copies on which it is checked."""
