"""Models and their mathematics: GPT-2, attention, loss, optimizers, recomputation, parallelism."""
