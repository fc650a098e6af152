"""Several gateways behind one database: which of them live, and which one has a client's samples."""
