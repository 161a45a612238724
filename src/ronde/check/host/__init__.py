"""The host itself: limits, memory, kernel, software and scheduler."""
