"""Grammars and tools: what holds an answer to a form."""
