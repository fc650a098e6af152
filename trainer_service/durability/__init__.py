"""Durable state: the journal, the snapshots, and how models are restored from them."""
