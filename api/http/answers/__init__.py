"""From updates of the engine to what a client reads."""
