"""Figures of the house: how the source is built, measured on the source alone.

    python -m benchmarks.house [ROOT] [--json]

ROOT is a checkout, this one unless it is given; older ones, whose imports lack the prefix `bequest.`, can be measured
too. Each figure has a module here whose docstring says what is counted and what is not.
"""
