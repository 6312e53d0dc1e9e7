"""Answers that are told whole: the texts of several in one call, and rows of JSON around them.

A search has as many choices as other requests have tokens.
"""

from bequest.engine._C import spell_answers, write_rows

__all__ = ["spell_answers", "write_rows"]
