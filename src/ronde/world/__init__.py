"""Who am I, how many are we, where do we meet: read once from the environment."""

from ronde.world.environment import read_claim
from ronde.world.value import Claim, Launcher, Meeting, World

__all__ = ["Claim", "Launcher", "Meeting", "World", "read_claim"]
