"""Draft tokens: guesses at a request's next tokens, which one step checks all at once.

    texts.py      what followed the same tokens before        -> a proposal for each row
    predicted.py  or what a layer of the model itself says    -> a proposal for each row
    chances.py    how often such proposals were right         -> the chance of each draft
    gain.py       what steps with drafts took                 -> how many drafts of each row the step checks

A row with k drafts computes 1 + k positions and samples after each. Drafts are kept as far as they equal what was
sampled, and one sampled token follows them: 1 .. k + 1 tokens a step, the same ones as without drafts.
"""

from scheduler.drafts.drafter import Drafter
from scheduler.drafts.predicted import Predicted
from scheduler.drafts.texts import OwnText, Proposal, Proposer, RecentTexts

__all__ = ["Drafter", "OwnText", "Predicted", "Proposal", "Proposer", "RecentTexts"]
