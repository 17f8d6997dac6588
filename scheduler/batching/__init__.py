"""What goes into a step: the rules that look at the whole of the scheduler's state."""
