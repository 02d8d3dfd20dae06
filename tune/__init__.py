"""Many measured runs in, the fastest configuration under a memory limit out."""
