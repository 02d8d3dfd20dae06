"""Strategies of a search, which choose the next trial without importing Ray."""
