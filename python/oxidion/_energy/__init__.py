"""Energy of the matrices of a checkpoint by rank."""
