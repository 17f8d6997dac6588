"""Making an engine of a plan, and the processes that it runs in."""
