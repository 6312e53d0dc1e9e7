"""The process: its options, start, signals and end."""
