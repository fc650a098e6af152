"""Several machines: how `tinsmith up` on one admits the others, and what they tell each other."""
