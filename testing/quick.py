"""A plugin of pytest for `make quick`: what it runs must work without torch, whose import alone takes seconds."""

import sys

# A module that is None cannot be imported: a file that needs torch fails with the import's line.
sys.modules["torch"] = None  # type: ignore[assignment]
