"""Runs in MLflow: references to them, the store, and a tracker that never slows or ends the work that it records."""

import os

# MLflow reads these variables when it is imported, which happens in the modules of this package.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
