"""Pure scheduling logic: requests, blocks, prefix cache, policy, fairness. Imports neither torch nor the engine."""
