"""What the program on a host does when it is asked; one file a subject."""
