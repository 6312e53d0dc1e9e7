"""Other APIs, each in a folder with a `door.py` that has its `DOOR`."""
