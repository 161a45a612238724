"""Imported last by the fork server: what it has loaded is garbage in no rank.

A collection would look at all of it, a fifth of a second long, and with that copy the
memory that ranks share.
"""

import gc

gc.collect()
gc.freeze()
