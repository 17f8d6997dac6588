"""Models and adapters of the Hugging Face hub: what a repository offers, its headers, its files, the local cache."""
