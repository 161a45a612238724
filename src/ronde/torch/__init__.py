"""The PyTorch front end: the API of ``horovod.torch``."""
