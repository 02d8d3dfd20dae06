"""Reports and charts of a search."""
