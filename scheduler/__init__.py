"""Pure scheduling logic: requests, blocks, prefix cache, batching policy, fairness. Imports neither torch nor the engine."""
