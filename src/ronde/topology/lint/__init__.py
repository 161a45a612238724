"""What is wrong with machines and with the files that describe them, by rules."""
