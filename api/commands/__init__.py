"""What the subcommands of `ktserve` do."""
