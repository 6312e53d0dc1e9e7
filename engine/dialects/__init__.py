"""How models write their answers: what they think, what they say, and what they call."""
