"""The front end of Keras 2, which TensorFlow calls ``tf.keras``."""
