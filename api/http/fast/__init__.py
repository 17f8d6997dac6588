"""The fast path of answers: tokens are written where they arrive, straight to the connection, as one join each.

Nothing else knows how: without it (`ENABLED` False), each write wakes the request's task, passes through all layers
around its route, and is encoded as a whole. Both ways write the same bytes (docs/front.md).
"""

ENABLED = True
