"""Several processes that compute one model: the one that serves, and others that follow it."""
