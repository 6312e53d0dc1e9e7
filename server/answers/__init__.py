"""Requests → deltas → answers: they run here, and what comes of them becomes JSON, whole or streamed."""
