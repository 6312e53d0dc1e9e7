"""Hidden states: the memory that they take on the host."""
