"""What physics lets collectives reach on machines, and which link it is that binds."""
