"""Who calls, what exists for them, what they may use and what they have used."""
