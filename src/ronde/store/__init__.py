"""The key-value store that the ranks of a job meet in, without any framework.

``state`` is the store itself and pure; ``protocol`` is what goes over a connection;
``client`` asks, from any thread. Who answers: the controller of ``ronde run``
(``launch.event_loop``), else a thread of rank 0 (``server``).
"""
