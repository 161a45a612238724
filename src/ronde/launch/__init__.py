"""Start one program on every slot and end it cleanly."""
