"""Commands for a terminal: models by name, a chat, one prompt. server/ has `bequest serve`, bench/ `bequest bench`."""
