"""The names of matrices that have a row for each token: embeddings, and heads, which may be the same ones. No torch
here."""

from __future__ import annotations

VOCABULARY = frozenset(
    {
        *("model.embed_tokens", "lm_head", "model.shared", "shared", "model.decoder.embed_tokens", "proj_out"),
        "model.embed_tokens_per_layer",  # Gemma 4's
    }
)
