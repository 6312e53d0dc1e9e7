"""Guesses of what a sequence says next."""
