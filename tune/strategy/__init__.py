"""Strategies of a search, which choose the next trial. They do not import Ray."""
