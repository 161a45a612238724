"""Horovod's callbacks for ``tf.keras``."""

from ronde.keras.callback_classes import callback_classes
from ronde.session.frameworks import import_framework

globals().update(callback_classes(import_framework("tensorflow").keras))
