"""The trials of a search or ladder: planned, driven by Ray Tune, stored, and logged to MLflow."""
