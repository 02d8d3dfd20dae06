"""The machine and its GPUs: capabilities, telemetry, and the provenance of results."""
