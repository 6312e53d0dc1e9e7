"""Hidden states: what is asked for, what a step captures, and extractions as requests of their own."""
