"""A run's folder and its checkpoints, on disk and in object storage."""
