"""One tokenizing job: its plan, the task that Ray Data runs for each piece, and what the output folder holds."""
