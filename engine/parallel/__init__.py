"""One model over several processes, a GPU each (--tensor-parallel)."""
