"""An engine without a model: real messages, scheduler and steps, each of a set length, with fixed tokens."""
