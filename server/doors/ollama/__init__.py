"""Ollama's API: chat, generate, embed, and what its clients ask about models."""
