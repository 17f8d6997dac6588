"""The endpoint that clients ask: it passes a request to the replica that the router has chosen."""
