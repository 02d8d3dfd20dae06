"""Books: find them, open them, clean them, or say why one is left out."""
