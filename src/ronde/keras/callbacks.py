"""Horovod's callbacks for Keras 3."""

from ronde.keras.callback_classes import callback_classes
from ronde.session.frameworks import import_framework

globals().update(callback_classes(import_framework("keras")))
