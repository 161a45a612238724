"""Every rule by its name, whatever it looks at."""

from typing import NamedTuple

from ronde.topology.lint.fleet import FLEET_RULES
from ronde.topology.lint.form_faults import FaultKind
from ronde.topology.lint.host import HOST_RULES


class Entry(NamedTuple):
    """A rule as people choose it.

    Attributes:
        subject: What it looks at.
        name: What findings and options call it.
        meaning: What it looks for, one line.
    """

    subject: str
    name: str
    meaning: str


_GRAPH_RULES = (
    ("channel-count", "another number of channels than are listed"),
    ("many-channels", "more channels than NCCL takes"),
    ("unknown-path-type", "a type of path that NCCL does not read"),
    ("no-speed", "channels without bandwidth"),
    ("broken-ring", "a ring that leaves a GPU out or has one twice"),
    ("broken-channel", "a channel of another pattern that does so"),
)

CATALOGUE = (
    *(Entry("a host", rule.name, rule.meaning) for rule in HOST_RULES),
    *(Entry("several hosts", rule.name, rule.meaning) for rule in FLEET_RULES),
    *(
        Entry(
            "an NCCL topology file",
            kind.rule,
            kind.value.what[0].lower() + kind.value.what[1:],
        )
        for kind in FaultKind
    ),
    *(Entry("an NCCL graph file", *rule) for rule in _GRAPH_RULES),
)
"""All rules, by what they look at."""
