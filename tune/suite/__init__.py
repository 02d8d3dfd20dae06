"""Ladders: the effect of each change in a suite, measured relative to a control."""
