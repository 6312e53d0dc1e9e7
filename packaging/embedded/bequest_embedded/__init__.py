"""Holds a GGUF file; there is nothing to import."""
