"""The ranks of `--tensor-parallel`: their group, and what of a model and of an adapter each has."""
