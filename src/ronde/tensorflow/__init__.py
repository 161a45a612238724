"""The TensorFlow front end: Horovod's API."""
