"""Where ranks sit and by which addresses they meet: decided before they start."""
