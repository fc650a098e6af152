"""What the gateway remembers: an index of what exists, which a restart does not lose."""
