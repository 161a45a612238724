"""The controller: from what the user wants to how the job ended."""
