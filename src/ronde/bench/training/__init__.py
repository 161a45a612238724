"""``ronde bench train``: steps of well-known models, and where their time goes.

``catalogue`` and ``outcome`` do not import torch: the command refuses bad words, and
shows results, without waiting for it.
"""
