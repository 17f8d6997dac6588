"""Stock clients against `ktserve serve` with the demo model: `make test-clients`."""
