"""One tokenizing job: its plan, the work on each partition with and without Ray, and its output folder."""
