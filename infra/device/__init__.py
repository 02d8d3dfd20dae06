"""The machine and its GPUs: what they are, what they do now, and who made a result on them."""
