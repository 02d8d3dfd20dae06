"""The model and its mathematics: GPT-2, attention, loss, optimizers, recomputation, parallelism."""
