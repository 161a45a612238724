"""One file for each format in which a machine's topology comes."""
