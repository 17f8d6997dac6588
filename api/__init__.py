"""HTTP and command line: everything a person or a client touches. Never imports torch."""
