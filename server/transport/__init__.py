"""How bytes come in and go out: bodies, events, pieces, and the errors of the protocol itself."""
