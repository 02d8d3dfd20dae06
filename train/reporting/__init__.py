"""Reports, charts and advice about a run, its page in MLflow, and its model card for Hugging Face."""
