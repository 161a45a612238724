"""Start a program once for every slot and see it through to its end.

A *controller* (``ronde run``) speaks frames over the standard input and output of one
*agent* a node; the agent owns that node's ranks, and its parent, the *reaper*, sweeps
what an agent that died left behind.

Nothing is imported here: an agent starts with the standard library and a few modules.
"""
