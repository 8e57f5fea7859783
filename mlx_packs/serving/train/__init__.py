"""Training over HTTP by the Tinker protocol, on the port and the base of a server."""
