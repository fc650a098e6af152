"""The HTTP side: bodies, connections, routes and what they are documented as."""
