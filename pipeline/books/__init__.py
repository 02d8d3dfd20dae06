"""Books: find, read and clean them, or explain why one is dropped."""
