"""Grammars that hold an answer to a form, and the token masks made from them."""
