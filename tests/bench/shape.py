"""The small model that the benchmarks' tests make."""

from __future__ import annotations

from benchmarks.models.shapes import Shape

SHAPE = Shape(
    layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=8, top_k=2, intermediate=256, vocabulary=300
)
