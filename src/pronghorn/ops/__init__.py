"""Pure functions on tensors: returns, losses, distributions, normalisation. They know no process and no config."""
