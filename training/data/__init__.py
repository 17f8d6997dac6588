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
from training.data.errors import DataError
from training.data.sampler import ShuffledSampler

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
