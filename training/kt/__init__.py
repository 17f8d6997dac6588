"""KTransformers' Python calls for fine-tuning, over our kernels. `from training import load_kt_model` does as well."""
