"""What both engines stand on: requests, sequences, versions, draws and scores. It imports neither engine."""
