"""What is wrong with machines, found by rules, and with the files that tell of them."""
