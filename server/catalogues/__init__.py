"""Item sets that answers can be bound to."""
