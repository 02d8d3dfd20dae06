"""Runs in MLflow: their key, the store, and a tracker that never slows or ends the work that it records."""

import os

# MLflow reads these when it is imported, which the modules of this package do.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
