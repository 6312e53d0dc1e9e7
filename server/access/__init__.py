"""Who may call, and how much."""
