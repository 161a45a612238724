"""One file for each form in which a machine's topology comes."""
