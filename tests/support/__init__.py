"""What the test modules share: the table of optimizers, inputs, trajectories and comparisons."""
