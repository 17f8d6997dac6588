"""HTTP, tokenizer, chat template, CLI. Imports neither torch nor transformers."""
