"""How the next trial is chosen. Plain Python, without Ray."""
