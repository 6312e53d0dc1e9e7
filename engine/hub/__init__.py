"""Models by name: found on the Hugging Face hub, fetched once, and kept in its cache. No torch here."""
