"""Small models for tests, and what they are made of."""
