"""Files and batches: requests that are answered when no live one needs the engine."""
