"""How versions arrive: the receiving side of the weight channel."""
