"""Training data: files to token ids, labels and rows. `training.data.collate` makes tensors of them."""

from training.data.build import (
    IGNORED,
    Dataset,
    PackedDataset,
    PreferenceDataset,
    SampleDataset,
    build_datasets,
    load_tokenizer,
)
from training.data.sampler import ShuffledSampler
from training.errors import DataError

__all__ = [
    "IGNORED",
    "DataError",
    "Dataset",
    "PackedDataset",
    "PreferenceDataset",
    "SampleDataset",
    "ShuffledSampler",
    "build_datasets",
    "load_tokenizer",
]
