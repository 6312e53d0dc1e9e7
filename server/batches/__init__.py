"""Files and batches: JSON lines in, JSON lines out, at the lowest priority and across restarts."""
