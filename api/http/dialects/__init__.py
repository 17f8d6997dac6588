"""Other forms of a chat: requests become chat requests, answers are written from the same deltas."""
