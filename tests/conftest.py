"""What all tests share: deterministic, bounded property tests."""

from hypothesis import settings

settings.register_profile("ktserve", max_examples=40, derandomize=True, deadline=None)
settings.load_profile("ktserve")
