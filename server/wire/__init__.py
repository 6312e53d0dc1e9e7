"""What stands on the wire: bodies, names, pages, errors and their sentences."""
