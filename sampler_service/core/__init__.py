"""The parts that both engines use: requests, sequences, versions, draws and scores. It imports neither engine."""
