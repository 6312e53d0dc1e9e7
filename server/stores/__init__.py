"""What lives as long as the server and is looked up by requests."""
