"""The training loop: plain torch, without Ray and without MLflow."""
