"""The HTTP application, and the endpoints that belong to no dialect."""
