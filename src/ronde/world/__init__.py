"""Who am I, how many are we, where do we meet: read once from the environment."""

from ronde.world.launcher_env import Launcher, Meeting, RankInfo, World, read_rank_info

__all__ = ["Launcher", "Meeting", "RankInfo", "World", "read_rank_info"]
