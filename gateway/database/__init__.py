"""The gateway's database: an index of sessions, runs, samplers and checkpoints that outlives a restart."""
