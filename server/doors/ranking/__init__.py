"""How well texts go together: /v1/score, and /v1/rerank, which orders documents by it."""
