"""Who runs next and how much: fairness, shares, waiting, drafts, the cost of a step."""
