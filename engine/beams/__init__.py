"""Beam search: which beams live on, whose blocks they continue, and the catalogues they may be bound to."""
