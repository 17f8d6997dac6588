"""The program: starts the command line, the engine process and the load test (see `__main__`)."""
