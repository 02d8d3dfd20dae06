"""Runs in, trials out: the fastest way to execute a global batch under a memory limit."""
