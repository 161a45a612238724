"""The controller: one job from its plan to its result."""
