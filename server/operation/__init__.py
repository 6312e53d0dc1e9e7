"""What an operator sees: logs, metrics, traces, systemd, health."""
