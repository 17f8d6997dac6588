"""What a training run takes of each device's memory, before a byte of weights is read."""
