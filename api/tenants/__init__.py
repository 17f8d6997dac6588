"""Who asks: keys, what each tenant may have, and how much of it."""
