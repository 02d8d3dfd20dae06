"""Profile a few training steps: the time and memory of their kernels."""
