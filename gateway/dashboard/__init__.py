"""The page at `/`: what it shows is gathered here, what it looks like lies in `static`."""
