"""Hidden states and embeddings: what is asked for, how it is computed, encoded and sent."""
