"""The key-value store that the ranks of a job meet in, without any framework.

``protocol`` is the store itself and what goes over a connection; ``client`` asks, from
any thread; the controller of ``ronde run``, or a thread of rank 0, answers.
"""
