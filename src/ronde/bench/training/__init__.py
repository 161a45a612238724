"""``ronde bench train``: training steps of well-known models, timed by phase.

``catalogue`` and ``outcome`` do not import torch, so the command rejects wrong options
and shows results without the delay of that import.
"""
