"""Vision towers: what makes rows of hidden states of an image."""
