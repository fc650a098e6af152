"""What a crash must not lose: the journal, snapshots, and how models come back from them."""
