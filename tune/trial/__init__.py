"""A trial: the training loop under a memory limit, the row of its result, and the comparison of rows."""
