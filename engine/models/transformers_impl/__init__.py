"""Models that the transformers library computes, over our cache. See README.md."""
