"""What the demo model learns to say: its world, and texts made up from it by a seed."""
