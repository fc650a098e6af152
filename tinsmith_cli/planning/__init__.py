"""`tinsmith plan` and the placement of `tinsmith up`: who gets which GPU and how much memory, before anything starts.
Loads no torch and no weights."""
