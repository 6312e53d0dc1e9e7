"""Leases in files: what a record owns outlives the process."""
