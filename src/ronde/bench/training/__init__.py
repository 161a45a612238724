"""`ronde bench train`: training steps of well-known models, and where a step goes.

``catalogue``, ``options``, ``phases`` and ``outcome`` do not import torch: the command
refuses bad words, and shows results, without waiting for it.
"""
