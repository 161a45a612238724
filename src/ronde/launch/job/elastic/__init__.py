"""An elastic job's side of the launcher; a plain job imports nothing of it."""
