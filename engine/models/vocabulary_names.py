"""The names of matrices that have a row for each token: embeddings, and heads, which may be the same ones. No torch
here."""

from __future__ import annotations

VOCABULARY = frozenset(
    {
        *("model.embed_tokens", "lm_head", "model.shared", "shared", "proj_out"),
        *("encoder.embed_tokens", "decoder.embed_tokens", "model.encoder.embed_tokens", "model.decoder.embed_tokens"),
        "model.embed_tokens_per_layer",  # Gemma 4's
    }
)
