"""One trial: the training loop under a memory limit, and the row that it leaves."""
