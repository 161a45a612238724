"""Whether hosts are fit to train on: facts of each, judged together."""
