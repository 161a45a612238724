"""The JAX front end."""
