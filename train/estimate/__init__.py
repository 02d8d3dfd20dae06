"""What a run will need before it is started: memory, arithmetic, time."""
