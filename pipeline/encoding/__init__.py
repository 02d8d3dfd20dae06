"""Text to token ids: tokenizers, their file formats, and splitting text into chunks."""
