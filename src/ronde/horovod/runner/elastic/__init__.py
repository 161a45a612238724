"""What an elastic launcher tells ranks."""
