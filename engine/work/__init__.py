"""Kinds of work: what requests are there for, one file each. The scheduler knows their verbs alone."""
