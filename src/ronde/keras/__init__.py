"""The front end of Keras 3, on its three backends."""
