"""How a Python on another host is told what to run."""

BOOTSTRAP = "import sys; del sys.path[0]; exec(sys.stdin.buffer.raw.readline(65536))"
"""For ``-E -S -c``: runs the first line of its standard input.

The same for all hosts and jobs, since every user there can read it, and without any
character that a login shell would read as its own. The line is taken byte by byte, so
that nothing behind it is. The first entry of the path is the directory that a login
happens to begin in.
"""
