"""A run on Ray Train: the driver's side and the worker's."""
