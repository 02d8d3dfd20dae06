"""Text to token ids: vocabularies, their file formats, and where a text may be cut."""
