"""What each kind of operation does, and the models that are live."""
