"""`ronde bench`: collectives and training steps, measured."""
