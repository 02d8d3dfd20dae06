"""A tokenizing job: its plan, the processing of its partitions with and without Ray, and its output folder."""
