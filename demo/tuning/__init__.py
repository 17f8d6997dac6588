"""The demo's adapters out of `ktserve train`: data, settings, and the whole way in one command (make train-demo)."""
