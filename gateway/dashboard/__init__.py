"""The dashboard at `/`: its data is gathered and read here, its page lies in `static`."""
