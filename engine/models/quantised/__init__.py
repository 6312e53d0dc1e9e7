"""Checkpoints of safetensors whose matrices are stored in codes: who wrote them, and how they are read."""
