"""Runs in MLflow: their key, the store, and the writer that never slows or ends the work that it records."""

import os

# Read by MLflow as it is imported, which the modules of this package do.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
