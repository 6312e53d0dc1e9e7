"""How the engine stands: what it tells observers, and the watchdog of its steps."""
