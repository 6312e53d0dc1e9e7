"""Random requests, mostly valid ones, made from the server's own description of itself."""
