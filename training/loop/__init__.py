"""Stock trainers over our experts: arguments, batches of steps, progress, files."""
