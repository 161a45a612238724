"""Messages, frames and connections between controller and agents."""
