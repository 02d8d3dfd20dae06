"""Conversion of text to token ids: tokenizers, their file formats, and splitting text into chunks."""
