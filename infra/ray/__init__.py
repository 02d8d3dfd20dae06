"""Starting or joining Ray, and the machines that it has."""
