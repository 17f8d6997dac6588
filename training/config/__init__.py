"""A training run's settings: LLaMA-Factory's YAML with KTransformers' keys, read strictly.

config = load_config("sft.yaml", ["learning_rate=1e-4"])
for run in config.runs():                              # one per adapter, at least one
"""

from training.config.fields import TrainConfig
from training.config.load import load_config
from training.errors import ConfigError

__all__ = ["ConfigError", "TrainConfig", "load_config"]
