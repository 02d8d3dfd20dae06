"""One tokenizing job: its plan, the work on each piece, with and without Ray, and what the output folder holds."""
