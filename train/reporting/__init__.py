"""What a person reads about a run: its report, charts, advice, and its pages in MLflow and on Hugging Face."""
